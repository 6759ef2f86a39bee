"""Published speed figures as data, and what each may be compared with. Nothing here was measured by this project."""
