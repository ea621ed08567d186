# The board that the lab boots. Tests of other boards run on Debian's QEMU.
CONFIG_ARM_VIRT=y
# A second image in memory, for the hypervisors of examples/el2.
CONFIG_GENERIC_LOADER=y
