"""The KV store: keeps full blocks outside the process."""
