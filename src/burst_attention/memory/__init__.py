"""Keep fewer bytes on the device during a training step."""
