// SPDX-License-Identifier: GPL-2.0
/*
 * The queue: requests to the device, and its completions.
 *
 * Completions are taken by the interrupt's handler, and by a thread: all of them without
 * interrupts, otherwise those whose interrupt was lost.
 */
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/kthread.h>
#include <linux/ratelimit.h>
#include <linux/slab.h>

#include "tessera.h"

#define TSR_COMPLETIONS (TSR_SLOTS * TSQ_COMPLETIONS_PER_SLOT)
#define TSR_QUEUE_BYTES (TSQ_SUBMISSIONS + TSR_SLOTS * sizeof(struct tsq_submission) + \
			 TSR_COMPLETIONS * sizeof(struct tsq_completion))
/* Time between looks at the queue. */
#define TSR_LOOK_BUSY_US 50
#define TSR_LOOK_IDLE (HZ / 100 ?: 1)
#define TSR_LOOK_IRQ HZ

/* Allocates the memory of the queue. */
int tsr_queue_alloc(struct tsr_dev *dev)
{
	struct tsr_queue *queue = &dev->queue;
	void *memory;

	BUILD_BUG_ON(PAGE_SIZE != TSQ_PAGE_BYTES);
	memory = dma_alloc_coherent(&dev->pdev->dev, TSR_QUEUE_BYTES, &queue->base, GFP_KERNEL);
	if (!memory)
		return -ENOMEM;
	queue->indices = memory;
	queue->submissions = memory + TSQ_SUBMISSIONS;
	queue->completions = (void *)(queue->submissions + TSR_SLOTS);
	queue->tail = 0;
	queue->head = 0;
	return 0;
}

/* Frees the memory of the queue, after the device has stopped. */
void tsr_queue_free(struct tsr_dev *dev)
{
	struct tsr_queue *queue = &dev->queue;

	if (queue->indices && !dev->leak)
		dma_free_coherent(&dev->pdev->dev, TSR_QUEUE_BYTES, queue->indices, queue->base);
	queue->indices = NULL;
}

/* Completes a request. The queue is locked. */
static void tsr_complete(struct tsr_dev *dev, struct tsr_request *request, int error)
{
	struct tsr_queue *queue = &dev->queue;

	queue->slot[request->cookie % TSR_SLOTS] = NULL;
	queue->in_flight--;
	request->error = error;
	/* Keeps the buffer if the device could not be stopped. */
	if (!dev->leak)
		request->pending = false;
	if (request->abandoned)
		queue_work(dev->work, &request->work);
	else
		complete(&request->done);
	wake_up(&queue->room);
}

static bool tsr_completed(struct tsr_dev *dev, u64 cookie, u32 bytes)
{
	struct tsr_request *request = dev->queue.slot[cookie % TSR_SLOTS];

	if (!request || request->cookie != cookie ||
	    bytes > request->buffer->pages * PAGE_SIZE || bytes < sizeof(struct tsq_reply))
		return false;
	request->bytes = bytes;
	tsr_complete(dev, request, 0);
	return true;
}

static bool tsr_handle(struct tsr_dev *dev, const struct tsq_completion *completion)
{
	u64 value = le64_to_cpu(READ_ONCE(completion->value));

	switch (le32_to_cpu(READ_ONCE(completion->kind))) {
	case TSQ_COMPLETION_DONE:
		return tsr_completed(dev, value, le32_to_cpu(READ_ONCE(completion->bytes)));
	case TSQ_COMPLETION_EVENT:
		tsr_file_event(dev, value);
		return true;
	case TSQ_COMPLETION_MEMORY:
		tsr_memory_returned(dev, value);
		return true;
	case TSQ_COMPLETION_WITHDRAW:
		WRITE_ONCE(dev->generation, value);
		queue_work(dev->work, &dev->withdraw);
		return true;
	default:
		/* Of a newer device. */
		return true;
	}
}

/* Takes all completions. Returns whether there were any. */
bool tsr_queue_drain(struct tsr_dev *dev)
{
	struct tsr_queue *queue = &dev->queue;
	unsigned long flags;
	bool any = false, valid = true;
	u32 tail;

	spin_lock_irqsave(&queue->lock, flags);
	while (queue->running && valid) {
		tail = le32_to_cpu(READ_ONCE(queue->indices->complete_tail));
		if (tail == queue->head)
			break;
		dma_rmb();
		any = true;
		valid = tail - queue->head <= TSR_COMPLETIONS;
		while (valid && queue->head != tail) {
			valid = tsr_handle(dev, &queue->completions[queue->head % TSR_COMPLETIONS]);
			queue->head++;
		}
		/* Entries are read before the device may write them again. */
		dma_mb();
		WRITE_ONCE(queue->indices->complete_head, cpu_to_le32(queue->head));
	}
	if (!valid) {
		WRITE_ONCE(dev->invalid, true);
		queue_work(dev->work, &dev->failed);
	}
	spin_unlock_irqrestore(&queue->lock, flags);
	return any;
}

/* Ends all requests, after the device has stopped. */
void tsr_queue_fail_all(struct tsr_dev *dev)
{
	struct tsr_queue *queue = &dev->queue;
	u32 slot;

	spin_lock_irq(&queue->lock);
	for (slot = 0; slot < TSR_SLOTS; slot++)
		if (queue->slot[slot])
			tsr_complete(dev, queue->slot[slot], -EIO);
	spin_unlock_irq(&queue->lock);
	wake_up_all(&queue->room);
}

/* Puts a request into the ring. Returns -EAGAIN if the ring is full. */
static int tsr_try_submit(struct tsr_request *request)
{
	struct tsr_dev *dev = request->dev;
	struct tsr_queue *queue = &dev->queue;
	struct tsq_submission *entry;
	u32 slot;
	int error = 0;

	spin_lock_irq(&queue->lock);
	if (!queue->running || dev->session != request->buffer->session) {
		error = -EIO;
		goto out;
	}
	for (slot = 0; slot < TSR_SLOTS && queue->slot[slot]; slot++)
		;
	/* There are as many entries as slots: one is free if the device reads them. */
	if (slot == TSR_SLOTS ||
	    queue->tail - le32_to_cpu(READ_ONCE(queue->indices->submit_head)) >= TSR_SLOTS) {
		error = -EAGAIN;
		goto out;
	}
	request->cookie = (u64)queue->sequence++ * TSR_SLOTS + slot;
	request->error = 0;
	request->pending = true;
	queue->slot[slot] = request;
	queue->in_flight++;
	entry = &queue->submissions[queue->tail % TSR_SLOTS];
	entry->list = cpu_to_le64(request->buffer->list_address);
	entry->pages = cpu_to_le32(request->buffer->pages);
	entry->bytes = cpu_to_le32(request->bytes);
	entry->cookie = cpu_to_le64(request->cookie);
	entry->reserved = 0;
	dma_wmb();
	WRITE_ONCE(queue->indices->submit_tail, cpu_to_le32(++queue->tail));
	writel(1, dev->regs + TSQ_REG_QUEUE_NOTIFY);
	if (!dev->irq)
		wake_up(&dev->kick);
out:
	spin_unlock_irq(&queue->lock);
	return error;
}

/*
 * Sends a request of the session that has its buffer. Waits while the ring is full, until a fatal
 * signal if killable. The buffer is the device's until tsr_wait() returns, unless there is an error.
 */
int tsr_submit(struct tsr_request *request, bool killable)
{
	struct tsr_queue *queue = &request->dev->queue;
	unsigned int state = killable ? TASK_KILLABLE : TASK_UNINTERRUPTIBLE;
	DEFINE_WAIT(wait);
	int error;

	reinit_completion(&request->done);
	for (;;) {
		prepare_to_wait(&queue->room, &wait, state);
		error = tsr_try_submit(request);
		if (error != -EAGAIN)
			break;
		if (killable && fatal_signal_pending(current)) {
			error = -EINTR;
			break;
		}
		/* Not for ever: entries become free without a completion. */
		schedule_timeout(HZ / 100 ?: 1);
	}
	finish_wait(&queue->room, &wait);
	return error;
}

/*
 * Waits for the reply to a request. If the process is killed, it returns TSR_ABANDONED, and the
 * request's orphan() is called when it is complete: the caller must not touch it any more.
 */
int tsr_wait(struct tsr_request *request)
{
	struct tsr_queue *queue = &request->dev->queue;
	bool abandoned;

	if (!wait_for_completion_killable(&request->done))
		return request->error;
	spin_lock_irq(&queue->lock);
	abandoned = queue->slot[request->cookie % TSR_SLOTS] == request;
	request->abandoned = abandoned;
	spin_unlock_irq(&queue->lock);
	return abandoned ? TSR_ABANDONED : request->error;
}

/* Sends a request and waits. Frees it, unless it returns 0. */
int tsr_call(struct tsr_request *request)
{
	int error = tsr_submit(request, true);

	if (!error) {
		error = tsr_wait(request);
		if (error == TSR_ABANDONED)
			return -EINTR;
	}
	if (!error) {
		const struct tsq_reply *reply = request->buffer->data;
		u32 errno = le32_to_cpu(reply->error);

		if (errno)
			error = errno < MAX_ERRNO ? -(int)errno : -EIO;
		else if (reply->result)
			error = -EIO;
	}
	if (error)
		tsr_request_free(request);
	return error;
}

static bool tsr_failed(struct tsr_dev *dev)
{
	/* The thread is stopped before the registers go. A suspended device is not running. */
	return READ_ONCE(dev->queue.running) &&
	       (readl(dev->regs + TSQ_REG_QUEUE_STATUS) & 0xff) != TSQ_STATE_RUNNING;
}

static int tsr_poll_queue(void *data)
{
	struct tsr_dev *dev = data;
	struct tsr_queue *queue = &dev->queue;
	unsigned long looked = jiffies;

	while (!kthread_should_stop()) {
		bool busy = READ_ONCE(queue->in_flight);

		if (!tsr_queue_drain(dev) && time_after(jiffies, looked + TSR_LOOK_IRQ)) {
			looked = jiffies;
			if (tsr_failed(dev))
				queue_work(dev->work, &dev->failed);
		}
		if (!dev->irq && busy) {
			usleep_range(TSR_LOOK_BUSY_US, 2 * TSR_LOOK_BUSY_US);
			continue;
		}
		wait_event_interruptible_timeout(dev->kick, kthread_should_stop() ||
						 (!dev->irq && READ_ONCE(queue->in_flight)),
						 dev->irq ? TSR_LOOK_IRQ : TSR_LOOK_IDLE);
	}
	return 0;
}

/* Starts the thread that takes completions. */
int tsr_queue_start_polling(struct tsr_dev *dev)
{
	struct task_struct *poller = kthread_run(tsr_poll_queue, dev, TSR_NAME);

	if (IS_ERR(poller))
		return PTR_ERR(poller);
	dev->poller = poller;
	return 0;
}

/* Stops the thread. */
void tsr_queue_stop_polling(struct tsr_dev *dev)
{
	if (dev->poller)
		kthread_stop(dev->poller);
	dev->poller = NULL;
}
