# The boards on which the monitor is tested.
CONFIG_ARM_VIRT=y
CONFIG_XLNX_VERSAL=y
# Versal's devices need these two without saying so.
CONFIG_SSI=y
CONFIG_XILINX_AXI=y
