"""What a run leaves: its record, its folder, and reading them again when someone else may have written them."""
