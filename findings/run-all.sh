#!/usr/bin/env bash
# Run every finding, or those that are named, and list what changed. Exit status 1 if anything did.
cd "$(dirname "$0")" || exit
FINDINGS=$(mktemp -d)
export FINDINGS
trap 'rm -rf "$FINDINGS"' EXIT
[ $# -gt 0 ] || set -- $(ls *.sh | grep -v run-all.sh)
changed=()
for script in "$@"; do
    echo "== $script"
    "./$script" || changed+=("$script")
done
echo "== ${#changed[@]} of $# changed: ${changed[*]-}"
[ ${#changed[@]} -eq 0 ]
