// SPDX-License-Identifier: GPL-2.0
/*
 * Addresses of pages for the device.
 *
 * All of them are in a list of the device, and go when the device has stopped: programs may keep
 * pages that the device used for longer than the device exists.
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

static void tsr_dma_free(struct device *dev, struct tsr_dma *dma)
{
	while (dma->count) {
		struct tsr_dma_range *range = &dma->range[--dma->count];

		dma_unmap_page(dev, range->address, range->length, DMA_BIDIRECTIONAL);
	}
	kvfree(dma->range);
	dma->range = NULL;
}

static int tsr_dma_map_runs(struct device *dev, struct tsr_dma *dma, struct page **page,
			    unsigned long pages)
{
	unsigned long at, run;

	for (at = 0; at < pages; at += run) {
		struct tsr_dma_range *range = &dma->range[dma->count];

		run = tsr_run(page + at, pages - at);
		range->length = run << PAGE_SHIFT;
		range->address = dma_map_page(dev, page[at], 0, range->length, DMA_BIDIRECTIONAL);
		if (dma_mapping_error(dev, range->address))
			return -ENOMEM;
		dma->count++;
	}
	return 0;
}

/* Gives pages addresses, those that are neighbours one range. */
int tsr_dma_map(struct tsr_dev *dev, struct tsr_dma *dma, struct page **page, unsigned long pages)
{
	unsigned long at, runs = 0;
	int error;

	for (at = 0; at < pages; at += tsr_run(page + at, pages - at))
		runs++;
	dma->count = 0;
	dma->range = kvcalloc(runs, sizeof(*dma->range), GFP_KERNEL);
	if (!dma->range)
		return -ENOMEM;
	mutex_lock(&dev->dma_lock);
	error = dev->dma_ok ? tsr_dma_map_runs(&dev->pdev->dev, dma, page, pages) : -EIO;
	if (error)
		tsr_dma_free(&dev->pdev->dev, dma);
	else
		list_add(&dma->link, &dev->dma);
	mutex_unlock(&dev->dma_lock);
	return error;
}

/* Removes the addresses, if that was not done. The device must not use them. */
void tsr_dma_unmap(struct tsr_dev *dev, struct tsr_dma *dma)
{
	mutex_lock(&dev->dma_lock);
	if (dma->range) {
		list_del(&dma->link);
		tsr_dma_free(&dev->pdev->dev, dma);
	}
	mutex_unlock(&dev->dma_lock);
}

/* Allows addresses, before the device starts. */
void tsr_dma_allow(struct tsr_dev *dev)
{
	mutex_lock(&dev->dma_lock);
	dev->dma_ok = true;
	mutex_unlock(&dev->dma_lock);
}

/* Removes all addresses, after the device has stopped. */
void tsr_dma_end(struct tsr_dev *dev)
{
	struct tsr_dma *dma, *next;

	mutex_lock(&dev->dma_lock);
	dev->dma_ok = false;
	list_for_each_entry_safe(dma, next, &dev->dma, link) {
		list_del(&dma->link);
		tsr_dma_free(&dev->pdev->dev, dma);
	}
	mutex_unlock(&dev->dma_lock);
}
