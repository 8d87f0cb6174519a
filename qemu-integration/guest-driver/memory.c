// SPDX-License-Identifier: GPL-2.0
/*
 * Pages for the device: allocated for it, or pinned pages of a program.
 *
 * A memory is in the device's table while the device may use it. What removes it from there owns
 * the table's reference, and drops it. All others touch a memory of the table with a reference of
 * their own only. Calls, places and mappings of programs have such references.
 */
#include <linux/moduleparam.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "tessera.h"

/* Orders of allocations: 2 MiB, 64 KiB, a page. */
static const unsigned int tsr_orders[] = { 9, 4, 0 };

#define TSR_PIN_CHUNK 512ul

static uint max_memory = 50;
module_param(max_memory, uint, 0644);
MODULE_PARM_DESC(max_memory, "Percentage of memory that programs may allocate and pin (50)");

static atomic_long_t tsr_charged;

static bool tsr_charge(unsigned long pages)
{
	unsigned long limit = totalram_pages() / 100 * min(READ_ONCE(max_memory), 100u);

	if (pages > limit)
		return false;
	if (atomic_long_add_return(pages, &tsr_charged) <= limit)
		return true;
	atomic_long_sub(pages, &tsr_charged);
	return false;
}

/* Frees a block's pages one by one, as split_page() makes them. */
static void tsr_free_pages(struct tsr_memory *memory)
{
	unsigned long at;

	if (memory->pinned) {
		/* The device may have written to them. */
		unpin_user_pages_dirty_lock(memory->page, memory->pages, true);
		return;
	}
	for (at = 0; at < memory->pages; at++) {
		put_page(memory->page[at]);
		if (at % TSR_PIN_CHUNK == 0)
			cond_resched();
	}
}

static void tsr_memory_free(struct kref *ref)
{
	struct tsr_memory *memory = container_of(ref, struct tsr_memory, ref);

	tsr_memory_free_list(memory);
	tsr_dma_free(memory->dev, &memory->dma);
	tsr_free_pages(memory);
	atomic_long_sub(memory->charged, &tsr_charged);
	kvfree(memory->page);
	kfree(memory);
}

void tsr_memory_put(struct tsr_memory *memory)
{
	kref_put(&memory->ref, tsr_memory_free);
}

static struct tsr_memory *tsr_memory_new(struct tsr_dev *dev, u32 session, u64 length)
{
	unsigned long pages = length >> PAGE_SHIFT;
	struct tsr_memory *memory;

	if (!pages || length & ~PAGE_MASK || !tsr_charge(pages))
		return ERR_PTR(-ENOMEM);
	memory = kzalloc(sizeof(*memory), GFP_KERNEL_ACCOUNT);
	if (memory)
		memory->page = kvcalloc(pages, sizeof(*memory->page), GFP_KERNEL_ACCOUNT);
	if (!memory || !memory->page) {
		kfree(memory);
		atomic_long_sub(pages, &tsr_charged);
		return ERR_PTR(-ENOMEM);
	}
	kref_init(&memory->ref);
	memory->dev = dev;
	memory->session = session;
	memory->charged = pages;
	return memory;
}

static int tsr_get_zeroed(struct tsr_memory *memory, unsigned long pages)
{
	unsigned int at = 0;

	while (memory->pages < pages) {
		unsigned int order = tsr_orders[at], part;
		gfp_t flags = GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN;
		struct page *page;

		if (fatal_signal_pending(current))
			return -EINTR;
		page = NULL;
		if (1ul << order <= pages - memory->pages)
			page = alloc_pages(order ? flags | __GFP_NORETRY : flags, order);
		if (!page) {
			if (!order)
				return -ENOMEM;
			at++;
			continue;
		}
		if (order)
			split_page(page, order);
		for (part = 0; part < 1u << order; part++)
			memory->page[memory->pages++] = page + part;
		cond_resched();
	}
	return 0;
}

static int tsr_pin(struct tsr_memory *memory, unsigned long pages)
{
	while (memory->pages < pages) {
		unsigned long chunk = min(pages - memory->pages, TSR_PIN_CHUNK);
		int done;

		if (fatal_signal_pending(current))
			return -EINTR;
		done = pin_user_pages_fast(memory->address + (memory->pages << PAGE_SHIFT), chunk,
					   FOLL_WRITE | FOLL_LONGTERM,
					   memory->page + memory->pages);
		if (done <= 0)
			return done ?: -EFAULT;
		memory->pages += done;
		cond_resched();
	}
	return 0;
}

/* Makes the list of ranges for a request. */
static int tsr_memory_list(struct tsr_memory *memory)
{
	u32 count = memory->dma.count, lists = DIV_ROUND_UP(count, TSQ_LIST_RANGES), at;
	struct page **page;
	int error;

	if (count > TSQ_MAX_RANGES)
		return -ENOMEM;
	page = kvcalloc(lists, sizeof(*page), GFP_KERNEL_ACCOUNT);
	memory->list = kvcalloc(lists, sizeof(*memory->list), GFP_KERNEL_ACCOUNT);
	if (!page || !memory->list) {
		kvfree(page);
		return -ENOMEM;
	}
	for (; memory->lists < lists; memory->lists++) {
		struct tsq_list *list = (void *)get_zeroed_page(GFP_KERNEL_ACCOUNT);

		if (!list) {
			kvfree(page);
			return -ENOMEM;
		}
		memory->list[memory->lists] = list;
		page[memory->lists] = virt_to_page(list);
	}
	/* One range each, to link them. */
	error = tsr_dma_map(memory->dev, memory->session, &memory->list_dma, page, lists);
	kvfree(page);
	if (error)
		return error;
	for (at = 0; at < count; at++) {
		struct tsq_list *list = memory->list[at / TSQ_LIST_RANGES];
		u32 entry = at % TSQ_LIST_RANGES;

		list->range[entry].address = cpu_to_le64(memory->dma.range[at].address);
		list->range[entry].length = cpu_to_le64(memory->dma.range[at].length);
		list->count = cpu_to_le32(entry + 1);
	}
	return 0;
}

/* Links the pages of the list by their addresses. */
static void tsr_memory_link(struct tsr_memory *memory)
{
	u32 at = 0, run;
	size_t offset;

	for (run = 0; run < memory->list_dma.count; run++) {
		const struct tsr_dma_range *range = &memory->list_dma.range[run];

		for (offset = 0; offset < range->length; offset += PAGE_SIZE, at++)
			if (at)
				memory->list[at - 1]->next = cpu_to_le64(range->address + offset);
	}
}

/* Frees the list, after the device has read it. */
void tsr_memory_free_list(struct tsr_memory *memory)
{
	tsr_dma_free(memory->dev, &memory->list_dma);
	while (memory->lists)
		free_page((unsigned long)memory->list[--memory->lists]);
	kvfree(memory->list);
	memory->list = NULL;
}

/*
 * Gives a memory an id in the device's table, which gets a reference. Not after the session's end,
 * which has emptied the table.
 */
static int tsr_memory_enter(struct tsr_memory *memory)
{
	struct tsr_dev *dev = memory->dev;
	int error = -EIO;

	mutex_lock(&dev->dma_lock);
	if (tsr_dma_allowed(dev, memory->session)) {
		kref_get(&memory->ref);
		error = xa_alloc_cyclic_irq(&dev->memories, &memory->id, memory,
					    XA_LIMIT(1, U32_MAX), &dev->next_memory, GFP_KERNEL);
		/* The caller has a reference, too. */
		if (error < 0)
			tsr_memory_put(memory);
	}
	mutex_unlock(&dev->dma_lock);
	return min(error, 0);
}

/* Gives pages addresses and an id. */
static int tsr_memory_add(struct tsr_memory *memory)
{
	int error;

	error = tsr_dma_map(memory->dev, memory->session, &memory->dma, memory->page,
			    memory->pages);
	if (!error)
		error = tsr_memory_list(memory);
	if (error)
		return error;
	tsr_memory_link(memory);
	return tsr_memory_enter(memory);
}

/* Adds a memory that has its pages, or frees it after an error. */
static struct tsr_memory *tsr_memory_finish(struct tsr_memory *memory, int error)
{
	if (!error)
		error = tsr_memory_add(memory);
	if (!error)
		return memory;
	tsr_memory_put(memory);
	return ERR_PTR(error);
}

/* Allocates zeroed pages. */
struct tsr_memory *tsr_memory_allocate(struct tsr_dev *dev, u32 session, u64 length)
{
	struct tsr_memory *memory = tsr_memory_new(dev, session, length);
	int error;

	if (IS_ERR(memory))
		return memory;
	error = tsr_get_zeroed(memory, length >> PAGE_SHIFT);
	return tsr_memory_finish(memory, error);
}

/* Pins pages of this process. */
struct tsr_memory *tsr_memory_pin(struct tsr_dev *dev, u32 session, u64 address, u64 length)
{
	struct tsr_memory *memory;
	int error;

	if (address & ~PAGE_MASK || address + length < address || address + length > TASK_SIZE_MAX)
		return ERR_PTR(-EFAULT);
	memory = tsr_memory_new(dev, session, length);
	if (IS_ERR(memory))
		return memory;
	memory->pinned = true;
	memory->address = address;
	error = tsr_pin(memory, length >> PAGE_SHIFT);
	return tsr_memory_finish(memory, error);
}

/*
 * Returns an allocated memory of a session with a reference, or NULL. Pinned pages are their
 * program's only.
 */
struct tsr_memory *tsr_memory_get(struct tsr_dev *dev, u32 session, u64 id)
{
	struct tsr_memory *memory;

	if (id > U32_MAX)
		return NULL;
	xa_lock_irq(&dev->memories);
	memory = xa_load(&dev->memories, id);
	if (memory && (memory->pinned || memory->session != session))
		memory = NULL;
	if (memory)
		kref_get(&memory->ref);
	xa_unlock_irq(&dev->memories);
	return memory;
}

/* Returns a page with a reference, or NULL after the end of the memory's session. */
struct page *tsr_memory_page(struct tsr_memory *memory, unsigned long index)
{
	struct page *page;

	if (index >= memory->pages || !tsr_session_is(memory->dev, memory->session))
		return NULL;
	page = memory->page[index];
	get_page(page);
	return page;
}

/* Takes a memory back that the device does not use, as it did not take it. */
void tsr_memory_take_back(struct tsr_memory *memory)
{
	/* The session's end takes it back, too: one of both finds it in the table. */
	if (!memory->id || xa_cmpxchg_irq(&memory->dev->memories, memory->id, memory, NULL,
					  GFP_KERNEL) != memory)
		return;
	tsr_dma_unmap(memory->dev, &memory->dma);
	tsr_memory_put(memory);
}

/* Notes that the device no longer uses a memory. From interrupts. */
void tsr_memory_returned(struct tsr_dev *dev, u64 id)
{
	struct tsr_memory *memory;
	unsigned long flags;

	if (id > U32_MAX)
		return;
	xa_lock_irqsave(&dev->memories, flags);
	memory = __xa_erase(&dev->memories, id);
	xa_unlock_irqrestore(&dev->memories, flags);
	if (memory && llist_add(&memory->returned, &dev->returned))
		queue_work(dev->work, &dev->return_work);
}

/* Frees what the device no longer uses. */
void tsr_memory_return_work(struct work_struct *work)
{
	struct tsr_dev *dev = container_of(work, struct tsr_dev, return_work);
	struct tsr_memory *memory, *next;

	llist_for_each_entry_safe(memory, next, llist_del_all(&dev->returned), returned) {
		tsr_dma_unmap(dev, &memory->dma);
		tsr_memory_put(memory);
	}
}

/*
 * Takes all memory back, after the device has stopped and new addresses are forbidden. Calls may take
 * theirs back meanwhile: a memory is touched only once its table's reference is ours.
 */
void tsr_memory_return_all(struct tsr_dev *dev)
{
	struct tsr_memory *memory;
	unsigned long id;

	flush_work(&dev->return_work);
	xa_for_each(&dev->memories, id, memory) {
		memory = xa_erase_irq(&dev->memories, id);
		/* A device that could not be stopped keeps its reference for ever. */
		if (!memory || dev->leak)
			continue;
		tsr_dma_unmap(dev, &memory->dma);
		tsr_memory_put(memory);
	}
}
