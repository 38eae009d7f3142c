"""Other packages' names for the same attention: scripts written for them run on ours when one import changes."""
