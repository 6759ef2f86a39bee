"""pytest plugin: gates as test items (`pytest --decodegate-profile smoke`)."""
