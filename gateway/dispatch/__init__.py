"""The life cycle of an admitted request: published, fenced, resumed on another worker, canceled, recorded."""
