/* SPDX-License-Identifier: GPL-2.0 */
/* Differences between Linux 6.1 and newer kernels. */
#ifndef TESSERA_COMPAT_H
#define TESSERA_COMPAT_H

#include <linux/device.h>
#include <linux/mm.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
static inline void vm_flags_set(struct vm_area_struct *vma, unsigned long flags)
{
	vma->vm_flags |= flags;
}
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
#define tsr_class_create(name) class_create(THIS_MODULE, name)
#else
#define tsr_class_create(name) class_create(name)
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define TSR_DEVNODE_CONST
#else
#define TSR_DEVNODE_CONST const
#endif

#endif
