# The boards that the lab and its users boot, with the devices that they have in Debian's QEMU without being asked.
CONFIG_I440FX=y
CONFIG_Q35=y
CONFIG_FDC_ISA=y
CONFIG_HPET=y
CONFIG_VMMOUSE=y
CONFIG_VMPORT=y
# Disks of guests.
CONFIG_VIRTIO_PCI=y
CONFIG_VIRTIO_BLK=y
