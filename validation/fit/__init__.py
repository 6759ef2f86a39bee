"""Whether a specialised decode path is for a deployment, before anything is loaded or measured."""
