"""The model's weights and layers: loading, adapters, faster linear layers."""
