"""How ranks come to be: local ones, those of a job that runs already, and the mesh over them."""
