// SPDX-License-Identifier: GPL-2.0
/* Mappings of the device files: the doorbell page, memory, and ranges of nvidia-uvm. */
#include <linux/mm.h>

#include "compat.h"
#include "tessera.h"

#define TSR_INSERT_PAGES 64ul

static void tsr_memory_vm_open(struct vm_area_struct *vma)
{
	struct tsr_memory *memory = vma->vm_private_data;

	kref_get(&memory->ref);
}

static void tsr_memory_vm_close(struct vm_area_struct *vma)
{
	tsr_memory_put(vma->vm_private_data);
}

static vm_fault_t tsr_memory_vm_fault(struct vm_fault *vmf)
{
	vmf->page = tsr_memory_page(vmf->vma->vm_private_data, vmf->pgoff);
	return vmf->page ? 0 : VM_FAULT_SIGBUS;
}

static const struct vm_operations_struct tsr_memory_vm_ops = {
	.open = tsr_memory_vm_open,
	.close = tsr_memory_vm_close,
	.fault = tsr_memory_vm_fault,
};

/* Maps pages of a memory. Faults map what cannot be mapped now. */
static int tsr_map_memory(struct tsr_file *file, struct vm_area_struct *vma,
			  const struct tsq_mapped *mapped)
{
	u64 offset = le64_to_cpu(mapped->offset) >> PAGE_SHIFT;
	struct tsr_memory *memory;
	unsigned long at;

	if (!PAGE_ALIGNED(le64_to_cpu(mapped->offset)))
		return -EIO;
	memory = tsr_memory_get(file->dev, file->session, le64_to_cpu(mapped->memory));
	if (!memory)
		return -EIO;
	if (offset > memory->pages || vma_pages(vma) > memory->pages - offset) {
		tsr_memory_put(memory);
		return -EIO;
	}
	vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP | VM_MIXEDMAP);
	vma->vm_pgoff = offset;
	vma->vm_private_data = memory;
	vma->vm_ops = &tsr_memory_vm_ops;
	for (at = 0; at < vma_pages(vma); at += TSR_INSERT_PAGES) {
		unsigned long count = min(vma_pages(vma) - at, TSR_INSERT_PAGES);

		if (vm_insert_pages(vma, vma->vm_start + (at << PAGE_SHIFT),
				    memory->page + offset + at, &count))
			break;
	}
	return 0;
}

static int tsr_map_doorbell(struct tsr_file *file, struct vm_area_struct *vma)
{
	if (vma_pages(vma) > file->dev->doorbell_len >> PAGE_SHIFT)
		return -EINVAL;
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	vma->vm_pgoff = TSR_DOORBELL_OFFSET >> PAGE_SHIFT;
	vma->vm_private_data = file;
	vma->vm_ops = &tsr_doorbell_vm_ops;
	return 0;
}

/* A range whose pages come later. Its offset is where they are entered. */
static int tsr_map_range(struct tsr_file *file, struct vm_area_struct *vma, u64 offset, u64 length)
{
	if (!file->uvm || offset > TSR_MAX_OFFSET || length > TSR_MAX_OFFSET - offset)
		return -EINVAL;
	tsr_places_drop(file, offset, length);
	vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	vma->vm_private_data = file;
	vma->vm_ops = &tsr_range_vm_ops;
	return 0;
}

/* Asks the device what a mapping shows. */
static struct tsr_request *tsr_map_request(struct tsr_file *file, struct vm_area_struct *vma)
{
	struct tsr_request *request = tsr_request_new(file->dev, file->session, 1);
	struct tsq_map *map;
	int error;

	if (IS_ERR(request))
		return request;
	map = tsr_request_begin(request, TSQ_OP_MAP, file->id, sizeof(*map));
	map->length = cpu_to_le64(vma->vm_end - vma->vm_start);
	map->offset = cpu_to_le64((u64)vma->vm_pgoff << PAGE_SHIFT);
	map->flags = cpu_to_le32(vma->vm_flags & VM_WRITE ? TSQ_MAP_WRITABLE : 0);
	error = tsr_call(request);
	return error ? ERR_PTR(error) : request;
}

int tsr_file_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct tsr_file *file = filp->private_data;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT, length = vma->vm_end - vma->vm_start;
	const struct tsq_mapped *mapped;
	struct tsr_request *request;
	int error;

	if (!(vma->vm_flags & VM_SHARED) || offset >> PAGE_SHIFT != vma->vm_pgoff)
		return -EINVAL;
	request = tsr_map_request(file, vma);
	if (IS_ERR(request))
		return PTR_ERR(request);
	mapped = request->buffer->data;
	error = -EIO;
	if (request->bytes >= sizeof(*mapped)) {
		switch (le32_to_cpu(mapped->kind)) {
		case TSQ_MAPPED_EMPTY:
			error = tsr_map_range(file, vma, offset, length);
			break;
		case TSQ_MAPPED_DOORBELL:
			error = tsr_map_doorbell(file, vma);
			break;
		case TSQ_MAPPED_MEMORY:
			error = tsr_map_memory(file, vma, mapped);
			break;
		}
	}
	tsr_request_free(request);
	return error;
}

/* Removes the pages of all mappings. Accesses fault from then on. */
void tsr_unmap_all(struct tsr_dev *dev)
{
	unmap_mapping_range(dev->inode->i_mapping, 0, 0, 1);
}
