// The theme searches in a worker, and browsers start none for a page that is opened from a file. Here a hidden frame
// runs the worker's script and passes its messages on.
if (location.protocol === "file:") {
  const importScripts = (...urls) =>
    urls.reduce((before, url) => before.then(() => new Promise((loaded, failed) => {
      const script = document.createElement("script")
      Object.assign(script, {src: url, onload: loaded, onerror: failed})
      document.head.append(script)
    })), Promise.resolve())

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.style.display = "none"
      this.frame.srcdoc = `<script>window.importScripts = ${importScripts}</script><script src="${url}"></script>`
      this.ready = new Promise(loaded => { this.frame.onload = loaded }).then(() => {
        this.frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      })
      const place = () => document.body.append(this.frame)
      document.body ? place() : addEventListener("DOMContentLoaded", place)
    }

    postMessage(data) {
      const message = new MessageEvent("message", {data})
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(message))
    }
  }
}
