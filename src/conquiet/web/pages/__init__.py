"""The pages, one module per entry of the menu. Each gives its `routes`."""
