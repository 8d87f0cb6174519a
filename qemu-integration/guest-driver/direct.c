// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/tessera-vgpu: registers, doorbell page and interrupts for one program of root's that drives
 * the vGPU itself, as docs/device-interface.md describes it. vgpu-guest does.
 *
 * The program has the vGPU alone: the session of NVIDIA's files ends, and the next one starts when
 * the program closes the node. mmap() at BAR << TSR_DIRECT_BAR_SHIFT maps BAR 1 or 3. read() returns
 * the number of interrupts since the last one as u64, like an eventfd, and poll() waits for them.
 */
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/uaccess.h>

#include "compat.h"
#include "tessera.h"

#define TSR_DIRECT_BAR_SHIFT 40
#define TSR_DIRECT_BAR_PAGES (TSR_DIRECT_BAR_SHIFT - PAGE_SHIFT)

/* Counts an interrupt. Returns false if it is the queue's. */
bool tsr_direct_event(struct tsr_dev *dev)
{
	if (READ_ONCE(dev->direct.state) != TSR_DIRECT_OPEN)
		return false;
	atomic64_inc(&dev->direct.events);
	wake_up(&dev->direct.wait);
	return true;
}

/* Takes the vGPU from the program, if one has it. dev->lock is held. */
static void tsr_direct_take(struct tsr_dev *dev, enum tsr_direct_state state)
{
	if (dev->direct.state != TSR_DIRECT_OPEN)
		return;
	WRITE_ONCE(dev->direct.state, state);
	/* Faults that began before have mapped their page. */
	mutex_lock(&dev->doorbell_lock);
	mutex_unlock(&dev->doorbell_lock);
	tsr_unmap_all(dev);
	wake_up_all(&dev->direct.wait);
	/* The start of a session ends the program's channels, and so their use of its memory. */
	tsr_session_start(dev);
}

/* Ends the program's use of the vGPU, which is about to go or to be reset. dev->lock is held. */
void tsr_direct_end(struct tsr_dev *dev)
{
	tsr_direct_take(dev, TSR_DIRECT_LOST);
}

static int tsr_direct_open(struct inode *inode, struct file *filp)
{
	struct tsr_dev *dev = tsr_dev_get();
	int error = 0;

	if (!dev)
		return -ENODEV;
	if (mutex_lock_killable(&dev->lock)) {
		tsr_dev_put(dev);
		return -EINTR;
	}
	if (!dev->present)
		error = -ENODEV;
	else if (dev->direct.state != TSR_DIRECT_CLOSED || tsr_files_any(dev) ||
		 READ_ONCE(dev->checkpoint.done))
		error = -EBUSY;
	if (!error) {
		tsr_session_stop(dev);
		error = dev->leak ? -EIO : 0;
	}
	if (!error) {
		atomic64_set(&dev->direct.events, 0);
		WRITE_ONCE(dev->direct.state, TSR_DIRECT_OPEN);
	}
	mutex_unlock(&dev->lock);
	if (error) {
		tsr_dev_put(dev);
		return error;
	}
	filp->f_mapping = dev->inode->i_mapping;
	filp->private_data = dev;
	return nonseekable_open(inode, filp);
}

static int tsr_direct_release(struct inode *inode, struct file *filp)
{
	struct tsr_dev *dev = filp->private_data;

	mutex_lock(&dev->lock);
	tsr_direct_take(dev, TSR_DIRECT_CLOSED);
	WRITE_ONCE(dev->direct.state, TSR_DIRECT_CLOSED);
	mutex_unlock(&dev->lock);
	tsr_dev_put(dev);
	return 0;
}

static ssize_t tsr_direct_read(struct file *filp, char __user *to, size_t length, loff_t *offset)
{
	struct tsr_dev *dev = filp->private_data;
	u64 events;
	int error;

	if (length < sizeof(events))
		return -EINVAL;
	if (!READ_ONCE(dev->irq))
		return -EOPNOTSUPP;
	for (;;) {
		if (READ_ONCE(dev->direct.state) != TSR_DIRECT_OPEN)
			return -EIO;
		events = atomic64_xchg(&dev->direct.events, 0);
		if (events)
			return put_user(events, (u64 __user *)to) ?: sizeof(events);
		if (filp->f_flags & O_NONBLOCK)
			return -EAGAIN;
		error = wait_event_interruptible(dev->direct.wait,
						 atomic64_read(&dev->direct.events) ||
						 READ_ONCE(dev->direct.state) != TSR_DIRECT_OPEN);
		if (error)
			return error;
	}
}

static __poll_t tsr_direct_poll(struct file *filp, struct poll_table_struct *table)
{
	struct tsr_dev *dev = filp->private_data;

	poll_wait(filp, &dev->direct.wait, table);
	if (READ_ONCE(dev->direct.state) != TSR_DIRECT_OPEN)
		return EPOLLERR | EPOLLHUP;
	return atomic64_read(&dev->direct.events) ? EPOLLIN | EPOLLRDNORM : 0;
}

static vm_fault_t tsr_direct_fault(struct vm_fault *vmf)
{
	struct tsr_dev *dev = vmf->vma->vm_private_data;
	unsigned int bar = vmf->pgoff >> TSR_DIRECT_BAR_PAGES;
	unsigned long page = vmf->pgoff & (BIT_ULL(TSR_DIRECT_BAR_PAGES) - 1);
	vm_fault_t result = VM_FAULT_SIGBUS;

	if (mutex_lock_killable(&dev->doorbell_lock))
		return VM_FAULT_NOPAGE;
	if (READ_ONCE(dev->direct.state) == TSR_DIRECT_OPEN) {
		resource_size_t start = pci_resource_start(dev->pdev, bar);

		result = vmf_insert_pfn(vmf->vma, vmf->address, (start >> PAGE_SHIFT) + page);
	}
	mutex_unlock(&dev->doorbell_lock);
	return result;
}

static const struct vm_operations_struct tsr_direct_vm_ops = {
	.fault = tsr_direct_fault,
};

static int tsr_direct_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct tsr_dev *dev = filp->private_data;
	unsigned long page = vma->vm_pgoff & (BIT_ULL(TSR_DIRECT_BAR_PAGES) - 1);
	unsigned int bar = vma->vm_pgoff >> TSR_DIRECT_BAR_PAGES;
	u64 pages;

	if (!(vma->vm_flags & VM_SHARED) || (bar != TSR_BAR_DOORBELL && bar != TSR_BAR_CONTROL))
		return -EINVAL;
	pages = pci_resource_len(dev->pdev, bar) >> PAGE_SHIFT;
	if (page > pages || vma_pages(vma) > pages - page)
		return -EINVAL;
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	vma->vm_private_data = dev;
	vma->vm_ops = &tsr_direct_vm_ops;
	return 0;
}

const struct file_operations tsr_direct_ops = {
	.owner = THIS_MODULE,
	.open = tsr_direct_open,
	.release = tsr_direct_release,
	.read = tsr_direct_read,
	.poll = tsr_direct_poll,
	.mmap = tsr_direct_mmap,
};
