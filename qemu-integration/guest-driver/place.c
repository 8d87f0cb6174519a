// SPDX-License-Identifier: GPL-2.0
/*
 * Ranges of nvidia-uvm that programs have mapped, and the memory that the device places there
 * later.
 *
 * Places are by offset in the file, which has a list of them without overlap.
 */
#include <linux/file.h>
#include <linux/slab.h>

#include "tessera.h"

struct tsr_place {
	struct list_head link;
	u64 offset;		/* in the file */
	u64 length;
	u64 start;		/* in the memory */
	struct tsr_memory *memory;
};

static void tsr_place_free(struct tsr_place *place)
{
	list_del(&place->link);
	tsr_memory_put(place->memory);
	kfree(place);
}

static bool tsr_overlaps(const struct tsr_place *place, u64 offset, u64 length)
{
	return place->offset < offset + length && offset < place->offset + place->length;
}

/* Removes what a range overlaps: a place goes as a whole. */
static void tsr_places_drop_locked(struct tsr_file *file, u64 offset, u64 length)
{
	struct tsr_place *place, *next;

	list_for_each_entry_safe(place, next, &file->places, link)
		if (length == U64_MAX || tsr_overlaps(place, offset, length))
			tsr_place_free(place);
}

/* Removes the places of a range, or all. */
void tsr_places_drop(struct tsr_file *file, u64 offset, u64 length)
{
	mutex_lock(&file->places_lock);
	tsr_places_drop_locked(file, offset, length);
	mutex_unlock(&file->places_lock);
}

static vm_fault_t tsr_range_fault(struct vm_fault *vmf)
{
	struct tsr_file *file = vmf->vma->vm_private_data;
	u64 offset = (u64)vmf->pgoff << PAGE_SHIFT;
	struct tsr_place *place;

	mutex_lock(&file->places_lock);
	list_for_each_entry(place, &file->places, link) {
		if (offset >= place->offset && offset - place->offset < place->length) {
			u64 at = place->start + (offset - place->offset);

			vmf->page = tsr_memory_page(place->memory, at >> PAGE_SHIFT);
			break;
		}
	}
	mutex_unlock(&file->places_lock);
	return vmf->page ? 0 : VM_FAULT_SIGBUS;
}

/* A part that is unmapped loses its places: the file may be mapped there again. */
static void tsr_range_close(struct vm_area_struct *vma)
{
	tsr_places_drop(vma->vm_private_data, (u64)vma->vm_pgoff << PAGE_SHIFT,
			vma->vm_end - vma->vm_start);
}

/* A part of a mapping cannot be unmapped or changed: its places are whole. */
static int tsr_range_may_split(struct vm_area_struct *vma, unsigned long address)
{
	return -EINVAL;
}

const struct vm_operations_struct tsr_range_vm_ops = {
	.may_split = tsr_range_may_split,
	.close = tsr_range_close,
	.fault = tsr_range_fault,
};

/* Finds the file of a range of this process, and the range's offset in it. */
static struct file *tsr_range_file(struct tsr_dev *dev, u64 address, u64 length, u64 *offset)
{
	struct mm_struct *mm = current->mm;
	struct vm_area_struct *vma;
	struct file *filp = NULL;

	if (!mm || mmap_read_lock_killable(mm))
		return NULL;
	vma = vma_lookup(mm, address);
	if (vma && vma->vm_ops == &tsr_range_vm_ops && length <= vma->vm_end - address) {
		struct tsr_file *file = vma->vm_private_data;

		if (file->dev == dev) {
			*offset = ((u64)vma->vm_pgoff << PAGE_SHIFT) + (address - vma->vm_start);
			filp = get_file(vma->vm_file);
		}
	}
	mmap_read_unlock(mm);
	return filp;
}

static void tsr_place_add(struct tsr_file *file, struct tsr_place *place)
{
	mutex_lock(&file->places_lock);
	tsr_places_drop_locked(file, place->offset, place->length);
	list_add(&place->link, &file->places);
	mutex_unlock(&file->places_lock);
}

/* Shows memory in a range of this process, in place of what is there. */
int tsr_place(struct tsr_file *from, const struct tsq_place *message)
{
	struct tsr_dev *dev = from->dev;
	u64 address = le64_to_cpu(message->address), length = le64_to_cpu(message->length);
	u64 start = le64_to_cpu(message->offset), offset, size;
	struct tsr_memory *memory;
	struct tsr_place *place;
	struct file *filp;
	int error;

	if (!length || !PAGE_ALIGNED(address | length | start))
		return -EIO;
	memory = tsr_memory_get(dev, from->session, le64_to_cpu(message->memory));
	if (!memory)
		return -EIO;
	size = (u64)memory->pages << PAGE_SHIFT;
	place = kmalloc(sizeof(*place), GFP_KERNEL_ACCOUNT);
	error = place ? 0 : -ENOMEM;
	if (start > size || length > size - start)
		error = -EIO;
	filp = error ? NULL : tsr_range_file(dev, address, length, &offset);
	if (!filp) {
		/* What is no mapping of the file stays: the program maps the file there later. */
		kfree(place);
		tsr_memory_put(memory);
		return error;
	}
	*place = (struct tsr_place) {
		.offset = offset, .length = length, .start = start, .memory = memory,
	};
	tsr_place_add(filp->private_data, place);
	unmap_mapping_range(dev->inode->i_mapping, offset, length, 1);
	fput(filp);
	return 0;
}
