"""Drop-in functions with other packages' names: change one import to run their scripts on this library."""
