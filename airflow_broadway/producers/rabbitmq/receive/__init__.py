"""The source: secures messages in bundles before it returns them."""
