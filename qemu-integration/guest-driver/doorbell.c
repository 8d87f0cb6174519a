// SPDX-License-Identifier: GPL-2.0
/*
 * The doorbell page.
 *
 * Before the device's reader of the page sleeps, it asks to withdraw the page from all programs.
 * The next access of a program then faults, wakes the reader and gets the page back.
 */
#include <linux/slab.h>

#include "tessera.h"

static vm_fault_t tsr_doorbell_fault(struct vm_fault *vmf)
{
	struct tsr_file *file = vmf->vma->vm_private_data;
	unsigned long page = vmf->pgoff - (TSR_DOORBELL_OFFSET >> PAGE_SHIFT);
	struct tsr_dev *dev = file->dev;
	vm_fault_t result = VM_FAULT_SIGBUS;
	phys_addr_t address = dev->doorbell + (page << PAGE_SHIFT);

	if (page >= dev->doorbell_len >> PAGE_SHIFT)
		return VM_FAULT_SIGBUS;
	/* Held while the page is withdrawn, until the device knows. */
	if (mutex_lock_killable(&dev->doorbell_lock))
		return VM_FAULT_NOPAGE;
	/* The end of a session takes the lock too: registers are there. */
	if (tsr_session_is(dev, file->session)) {
		if (dev->withdrawn) {
			dev->withdrawn = false;
			writel(1, dev->regs + TSQ_REG_WAKE);
		}
		result = vmf_insert_pfn(vmf->vma, vmf->address, address >> PAGE_SHIFT);
	}
	mutex_unlock(&dev->doorbell_lock);
	return result;
}

const struct vm_operations_struct tsr_doorbell_vm_ops = {
	.fault = tsr_doorbell_fault,
};

/* Withdraws the page, as the device has asked. */
void tsr_doorbell_withdraw(struct work_struct *work)
{
	struct tsr_dev *dev = container_of(work, struct tsr_dev, withdraw);
	struct tsq_withdrawn *withdrawn;
	struct tsr_request *request;

	request = tsr_request_new(dev, READ_ONCE(dev->session), 1);
	if (IS_ERR(request))
		return; /* The device goes on looking at the page, or has stopped. */
	mutex_lock(&dev->doorbell_lock);
	withdrawn = tsr_request_begin(request, TSQ_OP_WITHDRAWN, 0, sizeof(*withdrawn));
	withdrawn->generation = cpu_to_le64(READ_ONCE(dev->generation));
	dev->withdrawn = true;
	unmap_mapping_range(dev->inode->i_mapping, TSR_DOORBELL_OFFSET, dev->doorbell_len, 1);
	if (!tsr_submit(request, false))
		wait_for_completion(&request->done);
	mutex_unlock(&dev->doorbell_lock);
	tsr_request_free(request);
}
