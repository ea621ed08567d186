# SPDX-License-Identifier: GPL-2.0
# Asks the headers of the kernel for the names that kernels have changed. The
# version does not tell: distributions take such changes back into older kernels
# (Debian's 6.12.117 has register_syscore of Linux 6.19).

# $(call declares,NAME,HEADER): a flag HAVE_NAME if the header has that word.
declares = $(if $(shell grep -sw '$(1)' $(srctree)/$(2)),-DHAVE_$(1))

ccflags-y += -I$(src)/../include
ccflags-y += $(call declares,rdmsrq,arch/x86/include/asm/msr.h)
ccflags-y += $(call declares,register_syscore,include/linux/syscore_ops.h)
ccflags-y += $(call declares,perf_event_pmu_context,include/linux/perf_event.h)
