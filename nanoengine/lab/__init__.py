"""The scheduler without a device, under a cost model."""
