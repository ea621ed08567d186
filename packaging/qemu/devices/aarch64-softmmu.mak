# The board that the lab boots. Tests of other boards run on Debian's QEMU.
CONFIG_ARM_VIRT=y
