"""Other products, each in a separate environment, measured beside Spillway in the same run."""
