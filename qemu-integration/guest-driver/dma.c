// SPDX-License-Identifier: GPL-2.0
/*
 * Addresses of pages for the device.
 *
 * All of them are in a list of the device, and are removed when the device has stopped: programs
 * may keep pages that the device used for longer than the device exists. The numbers stay readable
 * until their owner frees them, since the owner may be writing a request with them at that time.
 */
#include <linux/dma-mapping.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "tessera.h"

/* Maximum length of a range. */
#define TSR_MAX_RUN (SZ_1G >> PAGE_SHIFT)

/* Returns the number of neighbouring pages at the beginning. */
static unsigned long tsr_run(struct page **page, unsigned long pages)
{
	unsigned long first = page_to_pfn(page[0]), run = 1;

	while (run < pages && run < TSR_MAX_RUN && page_to_pfn(page[run]) == first + run)
		run++;
	return run;
}

/* Removes the first ranges of an object from the device. Their numbers stay. */
static void tsr_dma_unmap_runs(struct device *dev, const struct tsr_dma *dma, u32 count)
{
	u32 at;

	for (at = 0; at < count; at++)
		dma_unmap_page(dev, dma->range[at].address, dma->range[at].length,
			       DMA_BIDIRECTIONAL);
}

static int tsr_dma_map_runs(struct device *dev, struct tsr_dma *dma, struct page **page,
			    unsigned long pages)
{
	unsigned long at, run;
	u32 count = 0;

	for (at = 0; at < pages; at += run) {
		struct tsr_dma_range *range = &dma->range[count];

		run = tsr_run(page + at, pages - at);
		range->length = run << PAGE_SHIFT;
		range->address = dma_map_page(dev, page[at], 0, range->length, DMA_BIDIRECTIONAL);
		if (dma_mapping_error(dev, range->address)) {
			tsr_dma_unmap_runs(dev, dma, count);
			return -ENOMEM;
		}
		count++;
	}
	dma->count = count;
	return 0;
}

/*
 * Gives pages addresses of a session, those that are neighbours one range. Returns -EIO after the
 * session's end. On success, tsr_dma_free() must follow.
 */
int tsr_dma_map(struct tsr_dev *dev, u32 session, struct tsr_dma *dma, struct page **page,
		unsigned long pages)
{
	unsigned long at, runs = 0;
	int error;

	for (at = 0; at < pages; at += tsr_run(page + at, pages - at))
		runs++;
	dma->range = kvcalloc(runs, sizeof(*dma->range), GFP_KERNEL_ACCOUNT);
	if (!dma->range)
		return -ENOMEM;
	mutex_lock(&dev->dma_lock);
	error = tsr_dma_allowed(dev, session) ?
		tsr_dma_map_runs(&dev->pdev->dev, dma, page, pages) : -EIO;
	if (!error) {
		dma->mapped = true;
		list_add(&dma->link, &dev->dma);
	}
	mutex_unlock(&dev->dma_lock);
	if (error) {
		kvfree(dma->range);
		dma->range = NULL;
	}
	return error;
}

/* Removes the addresses, if the end of the session did not. The device must not use them. */
void tsr_dma_unmap(struct tsr_dev *dev, struct tsr_dma *dma)
{
	mutex_lock(&dev->dma_lock);
	if (dma->mapped) {
		dma->mapped = false;
		list_del(&dma->link);
		tsr_dma_unmap_runs(&dev->pdev->dev, dma, dma->count);
	}
	mutex_unlock(&dev->dma_lock);
}

/* Removes the addresses and frees their numbers. For the owner, which reads them no more. */
void tsr_dma_free(struct tsr_dev *dev, struct tsr_dma *dma)
{
	tsr_dma_unmap(dev, dma);
	kvfree(dma->range);
	dma->range = NULL;
	dma->count = 0;
}

/* Returns whether objects of a session may have addresses. dma_lock is held. */
bool tsr_dma_allowed(struct tsr_dev *dev, u32 session)
{
	lockdep_assert_held(&dev->dma_lock);
	return dev->dma_ok && READ_ONCE(dev->session) == session;
}

/* Allows or forbids new addresses, at the start and the end of a session. */
void tsr_dma_allow(struct tsr_dev *dev, bool ok)
{
	mutex_lock(&dev->dma_lock);
	dev->dma_ok = ok;
	mutex_unlock(&dev->dma_lock);
}

/*
 * Removes all addresses, after the device has stopped. If it could not be stopped, the driver's
 * removal forgets them instead: nothing may be unmapped after it.
 */
void tsr_dma_end(struct tsr_dev *dev)
{
	struct tsr_dma *dma, *next;

	mutex_lock(&dev->dma_lock);
	list_for_each_entry_safe(dma, next, &dev->dma, link) {
		list_del(&dma->link);
		dma->mapped = false;
		if (!dev->leak)
			tsr_dma_unmap_runs(&dev->pdev->dev, dma, dma->count);
	}
	mutex_unlock(&dev->dma_lock);
}
