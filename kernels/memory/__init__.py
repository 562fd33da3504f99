"""Where packed adapters live: host memory, one storage on the device, and the way between both."""
