// SPDX-License-Identifier: GPL-2.0
/*
 * Sessions: from a start of the device's queue to its stop.
 *
 * Files and memory belong to a session. When it ends, programs get errors, and the device no longer
 * uses memory of the guest. The next open() starts another one.
 */
#include <linux/delay.h>

#include "tessera.h"

/* Time that the device may take to start and to stop, in ms. */
#define TSR_LIMIT_MS 20000

static const char *const tsr_errors[] = {
	[TSQ_ERROR_NONE] = "none",
	[TSQ_ERROR_CONFIG] = "the queue is not in memory that the device can reach",
	[TSQ_ERROR_RING] = "an index of the queue is impossible",
	[TSQ_ERROR_ACCESS] = "a buffer is not in memory that the device can reach",
	[TSQ_ERROR_SUBMISSION] = "a request has an invalid form",
	[TSQ_ERROR_LOST] = "the GPU is lost: restart the vGPU on the host",
	[TSQ_ERROR_HOST] = "the host failed: its log has the cause",
};

static const char *tsr_error(u32 status)
{
	u32 error = status >> 8 & 0xff;

	if (status == ~0u)
		return "it is gone: its worker on the host has ended";
	return error < ARRAY_SIZE(tsr_errors) ? tsr_errors[error] : "unknown";
}

/* Waits for a state of the queue. Returns -EIO if it failed, -ENODEV if the device is gone. */
static int tsr_wait_state(struct tsr_dev *dev, u32 wanted)
{
	unsigned long limit = jiffies + msecs_to_jiffies(TSR_LIMIT_MS);

	for (;;) {
		u32 status = readl(dev->regs + TSQ_REG_QUEUE_STATUS);

		if (status == ~0u)
			return -ENODEV;
		if ((status & 0xff) == wanted)
			return 0;
		if (wanted == TSQ_STATE_RUNNING && (status & 0xff) == TSQ_STATE_FAILED) {
			/* Any program may try again at once. */
			dev_err_ratelimited(&dev->pdev->dev, "The vGPU does not start: %s\n",
					    tsr_error(status));
			return -EIO;
		}
		if (time_after(jiffies, limit))
			return -ETIMEDOUT;
		usleep_range(200, 1000);
	}
}

static int tsr_hello(struct tsr_dev *dev)
{
	struct tsr_request *request = tsr_request_new(dev, dev->session, TSQ_MAX_PAGES);
	struct tsr_queue *queue = &dev->queue;
	const struct tsq_reply *reply;
	int error;

	if (IS_ERR(request))
		return PTR_ERR(request);
	tsr_request_begin(request, TSQ_OP_HELLO, 0, sizeof(struct tsq_request));
	error = tsr_submit(request, false);
	if (error)
		goto out;
	if (!wait_for_completion_timeout(&request->done, msecs_to_jiffies(TSR_LIMIT_MS))) {
		spin_lock_irq(&queue->lock);
		request->abandoned = queue->slot[request->cookie % TSR_SLOTS] == request;
		spin_unlock_irq(&queue->lock);
		if (request->abandoned)
			return -ETIMEDOUT;
	}
	reply = request->buffer->data;
	error = request->error;
	if (!error && (reply->error || reply->result))
		error = -EIO;
	if (!error)
		error = tsr_welcome(dev, reply, request->bytes);
out:
	tsr_request_free(request);
	return error;
}

/* Resets a device that does not stop. Without the state before, it would have no registers. */
static int tsr_reset_device(struct tsr_dev *dev)
{
	int error = pci_save_state(dev->pdev);

	if (error)
		return error;
	error = pcie_reset_flr(dev->pdev, PCI_RESET_DO_RESET);
	pci_restore_state(dev->pdev);
	return error ?: tsr_wait_state(dev, TSQ_STATE_OFF);
}

/* Stops the device. Afterwards it uses no memory of the guest. */
static void tsr_stop_device(struct tsr_dev *dev)
{
	int error;

	if (readl(dev->regs + TSQ_REG_MAGIC) != TSQ_MAGIC)
		return; /* Unplugged. */
	writel(0, dev->regs + TSQ_REG_INTR_ENABLE);
	writel(0, dev->regs + TSQ_REG_QUEUE_CONTROL);
	error = tsr_wait_state(dev, TSQ_STATE_OFF);
	if (error == -ETIMEDOUT)
		error = tsr_reset_device(dev);
	if (error && error != -ENODEV) {
		dev_err(&dev->pdev->dev,
			"The vGPU does not stop: its memory is lost until the next boot\n");
		dev->leak = true;
	}
}

/* Starts a session. dev->lock is held. */
int tsr_session_start(struct tsr_dev *dev)
{
	struct tsr_queue *queue = &dev->queue;
	int error;

	if (dev->leak)
		return -EIO;
	error = tsr_queue_alloc(dev);
	if (error)
		return error;
	/* Before the queue runs: files of an earlier session must not pass for this one's. */
	spin_lock_irq(&queue->lock);
	WRITE_ONCE(dev->session, dev->session + 1);
	spin_unlock_irq(&queue->lock);
	mutex_lock(&dev->doorbell_lock);
	dev->withdrawn = false;
	mutex_unlock(&dev->doorbell_lock);
	tsr_dma_allow(dev, true);
	writel(lower_32_bits(queue->base), dev->regs + TSQ_REG_QUEUE_BASE_LO);
	writel(upper_32_bits(queue->base), dev->regs + TSQ_REG_QUEUE_BASE_HI);
	writel(TSR_SLOTS, dev->regs + TSQ_REG_QUEUE_SLOTS);
	writel(TSQ_CONTROL_ENABLE, dev->regs + TSQ_REG_QUEUE_CONTROL);
	error = tsr_wait_state(dev, TSQ_STATE_RUNNING);
	spin_lock_irq(&queue->lock);
	WRITE_ONCE(dev->invalid, false);
	smp_store_release(&queue->running, !error);
	spin_unlock_irq(&queue->lock);
	if (!error && dev->irq)
		writel(TSQ_INTR_QUEUE | TSQ_INTR_LOST, dev->regs + TSQ_REG_INTR_ENABLE);
	if (!error)
		error = tsr_hello(dev);
	if (error)
		tsr_session_stop(dev);
	return error;
}

/* Ends the session, if there is one: programs get errors from now on. dev->lock is held. */
void tsr_session_stop(struct tsr_dev *dev)
{
	struct tsr_queue *queue = &dev->queue;

	if (!queue->indices)
		return;
	spin_lock_irq(&queue->lock);
	WRITE_ONCE(queue->running, false);
	spin_unlock_irq(&queue->lock);
	tsr_unmap_all(dev);
	tsr_stop_device(dev);
	/* From here on nothing is added to the device's table and list: both can be emptied. */
	tsr_dma_allow(dev, false);
	tsr_queue_fail_all(dev);
	tsr_files_wake(dev);
	tsr_memory_return_all(dev);
	/* Faults that began before the end have mapped their page. */
	mutex_lock(&dev->doorbell_lock);
	mutex_unlock(&dev->doorbell_lock);
	tsr_unmap_all(dev);
	tsr_buffers_free(dev);
	if (!dev->leak)
		tsr_dma_end(dev);
	tsr_queue_free(dev);
}

/* Starts a session if there is none. */
int tsr_session_ensure(struct tsr_dev *dev)
{
	int error = 0;

	if (READ_ONCE(dev->queue.running))
		return 0;
	if (mutex_lock_killable(&dev->lock))
		return -EINTR;
	if (!dev->present)
		error = -ENODEV;
	else if (dev->direct.state != TSR_DIRECT_CLOSED)
		error = -EBUSY;
	else if (!dev->queue.running)
		error = tsr_session_start(dev);
	mutex_unlock(&dev->lock);
	return error;
}

/* Ends the session if the device has failed. */
void tsr_session_failed(struct work_struct *work)
{
	struct tsr_dev *dev = container_of(work, struct tsr_dev, failed);
	u32 status;

	mutex_lock(&dev->lock);
	if (dev->present && dev->queue.running) {
		status = readl(dev->regs + TSQ_REG_QUEUE_STATUS);
		if (READ_ONCE(dev->invalid))
			dev_err(&dev->pdev->dev, "The vGPU has sent an invalid completion\n");
		else if ((status & 0xff) != TSQ_STATE_RUNNING)
			dev_err(&dev->pdev->dev, "The vGPU has stopped: %s\n", tsr_error(status));
		if (READ_ONCE(dev->invalid) || (status & 0xff) != TSQ_STATE_RUNNING)
			tsr_session_stop(dev);
	}
	mutex_unlock(&dev->lock);
}
