"""The machine: presets, the device of a run, measured speeds, limits, and the doctor that reports them."""
