// SPDX-License-Identifier: GPL-2.0
/* Requests and their buffers. */
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "tessera.h"

/* Buffers of the greatest length to keep. */
#define TSR_MAX_IDLE 8

static void tsr_buffer_free(struct tsr_dev *dev, struct tsr_buffer *buffer)
{
	tsr_dma_free(dev, &buffer->dma);
	vfree(buffer->data);
	kfree(buffer);
}

/* Fills the list of the pages' addresses. The session may have ended meanwhile. */
static void tsr_buffer_list(struct tsr_buffer *buffer)
{
	u32 at = 0, range;
	size_t offset;

	for (range = 0; range < buffer->dma.count; range++) {
		const struct tsr_dma_range *run = &buffer->dma.range[range];

		for (offset = 0; offset < run->length; offset += PAGE_SIZE, at++) {
			if (at < buffer->pages)
				buffer->list[at] = cpu_to_le64(run->address + offset);
			else
				buffer->list_address = run->address + offset;
		}
	}
}

static struct tsr_buffer *tsr_buffer_new(struct tsr_dev *dev, u32 session, u32 pages)
{
	struct page *page[TSQ_MAX_PAGES + 1];
	struct tsr_buffer *buffer;
	int error = -ENOMEM;
	u32 at;

	/* Any number of threads may wait with a buffer: each counts for its program's cgroup. */
	buffer = kzalloc(sizeof(*buffer), GFP_KERNEL_ACCOUNT);
	if (!buffer)
		return ERR_PTR(error);
	buffer->pages = pages;
	buffer->session = session;
	buffer->data = __vmalloc((pages + 1) * PAGE_SIZE, GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!buffer->data)
		goto out;
	buffer->list = buffer->data + pages * PAGE_SIZE;
	for (at = 0; at <= pages; at++)
		page[at] = vmalloc_to_page(buffer->data + at * PAGE_SIZE);
	error = tsr_dma_map(dev, session, &buffer->dma, page, pages + 1);
	if (error)
		goto out;
	tsr_buffer_list(buffer);
	return buffer;

out:
	vfree(buffer->data);
	kfree(buffer);
	return ERR_PTR(error);
}

static struct tsr_buffer *tsr_buffer_idle(struct tsr_dev *dev)
{
	struct tsr_buffer *buffer;

	spin_lock(&dev->idle_lock);
	buffer = list_first_entry_or_null(&dev->idle, struct tsr_buffer, link);
	if (buffer) {
		list_del(&buffer->link);
		dev->idle_count--;
	}
	spin_unlock(&dev->idle_lock);
	return buffer;
}

static void tsr_buffer_put(struct tsr_dev *dev, struct tsr_buffer *buffer)
{
	spin_lock(&dev->idle_lock);
	if (buffer->pages == TSQ_MAX_PAGES && dev->idle_count < TSR_MAX_IDLE &&
	    tsr_session_is(dev, buffer->session)) {
		list_add(&buffer->link, &dev->idle);
		dev->idle_count++;
		buffer = NULL;
	}
	spin_unlock(&dev->idle_lock);
	if (buffer)
		tsr_buffer_free(dev, buffer);
}

/* Frees buffers that are not in use, after the device has stopped. */
void tsr_buffers_free(struct tsr_dev *dev)
{
	struct tsr_buffer *buffer;

	while ((buffer = tsr_buffer_idle(dev)))
		tsr_buffer_free(dev, buffer);
}

static void tsr_orphan_free(struct tsr_request *request)
{
	tsr_request_free(request);
}

static void tsr_orphan_work(struct work_struct *work)
{
	struct tsr_request *request = container_of(work, struct tsr_request, work);

	request->orphan(request);
}

/* Makes a request of a session, with a buffer of some pages. */
struct tsr_request *tsr_request_new(struct tsr_dev *dev, u32 session, u32 pages)
{
	struct tsr_request *request = kzalloc(sizeof(*request), GFP_KERNEL_ACCOUNT);
	struct tsr_buffer *buffer = NULL;

	if (!request)
		return ERR_PTR(-ENOMEM);
	/* Idle buffers are the current session's: one of another session needs none. */
	if (pages == TSQ_MAX_PAGES && tsr_session_is(dev, session))
		buffer = tsr_buffer_idle(dev);
	if (buffer && buffer->session != session) {
		tsr_buffer_put(dev, buffer);
		buffer = NULL;
	}
	if (!buffer)
		buffer = tsr_buffer_new(dev, session, pages);
	if (IS_ERR(buffer)) {
		kfree(request);
		return ERR_CAST(buffer);
	}
	request->buffer = buffer;
	kref_get(&dev->ref);
	request->dev = dev;
	request->orphan = tsr_orphan_free;
	init_completion(&request->done);
	INIT_WORK(&request->work, tsr_orphan_work);
	return request;
}

/* Frees a request. A buffer that the device may still use is lost. */
void tsr_request_free(struct tsr_request *request)
{
	if (!request)
		return;
	if (!request->pending)
		tsr_buffer_put(request->dev, request->buffer);
	tsr_dev_put(request->dev);
	kfree(request);
}

/* Begins the content of a request with a zeroed structure of some bytes. */
void *tsr_request_begin(struct tsr_request *request, u32 opcode, u64 file, u32 bytes)
{
	struct tsq_request *start = request->buffer->data;

	memset(start, 0, bytes);
	start->opcode = cpu_to_le32(opcode);
	start->file = cpu_to_le64(file);
	request->bytes = bytes;
	return start;
}
