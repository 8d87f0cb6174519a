// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/tessera-checkpoint: the host's requests to checkpoint the programs that use the vGPU, for
 * one agent of root's. vgpu-guest has it.
 *
 * read() waits until the request differs from the last one that this file has read, and returns
 * it: a u32, see TSQ_REG_CHECKPOINT_REQUEST. write() takes the answer: a u32,
 * TSQ_CHECKPOINT_STATE_*, and behind TSQ_CHECKPOINT_STATE_REFUSED the reason as text. After
 * TSQ_CHECKPOINT_STATE_DONE the vGPU has no session, and programs that open one of NVIDIA's files
 * wait for TSQ_CHECKPOINT_STATE_READY.
 */
#include <linux/module.h>
#include <linux/uaccess.h>

#include "tessera.h"

/* Time between looks at the request: without an interrupt, and while the programs wait. */
#define TSR_LOOK_REQUEST (5 * HZ)
#define TSR_LOOK_DONE (HZ / 10 ?: 1)

struct tsr_answer {
	__u32 state;
	__le32 reason[TSQ_CHECKPOINT_REASON_BYTES / sizeof(__le32)];
};

void tsr_checkpoint_init(struct tsr_checkpoint *checkpoint)
{
	init_rwsem(&checkpoint->opening);
	init_waitqueue_head(&checkpoint->wait);
}

/* Wakes the agent: the request may be another one, or the vGPU is gone. */
void tsr_checkpoint_wake(struct tsr_dev *dev)
{
	WRITE_ONCE(dev->checkpoint.signalled, true);
	wake_up(&dev->checkpoint.wait);
}

/* Wakes all who wait, since the vGPU is gone. */
void tsr_checkpoint_end(struct tsr_dev *dev)
{
	WRITE_ONCE(dev->checkpoint.done, false);
	tsr_checkpoint_wake(dev);
	wake_up_all(&dev->checkpoint.wait);
}

/*
 * Begins to open one of NVIDIA's files. Waits while the programs are checkpointed. On success,
 * tsr_checkpoint_end_open() must follow.
 */
int tsr_checkpoint_begin_open(struct tsr_dev *dev)
{
	struct tsr_checkpoint *checkpoint = &dev->checkpoint;
	int error;

	for (;;) {
		error = down_read_killable(&checkpoint->opening);
		if (error || !READ_ONCE(checkpoint->done))
			return error;
		up_read(&checkpoint->opening);
		error = wait_event_killable(checkpoint->wait, !READ_ONCE(checkpoint->done));
		if (error)
			return error;
	}
}

void tsr_checkpoint_end_open(struct tsr_dev *dev)
{
	up_read(&dev->checkpoint.opening);
}

/* Reads the request. */
static int tsr_checkpoint_request(struct tsr_dev *dev, u32 *request)
{
	int error = 0;

	if (mutex_lock_interruptible(&dev->lock))
		return -ERESTARTSYS;
	WRITE_ONCE(dev->checkpoint.signalled, false);
	if (dev->present)
		*request = readl(dev->regs + TSQ_REG_CHECKPOINT_REQUEST);
	else
		error = -ENODEV;
	mutex_unlock(&dev->lock);
	return error;
}

static ssize_t tsr_checkpoint_read(struct file *filp, char __user *to, size_t length,
				   loff_t *offset)
{
	struct tsr_dev *dev = filp->private_data;
	struct tsr_checkpoint *checkpoint = &dev->checkpoint;
	u32 request;
	long error;

	if (length < sizeof(request))
		return -EINVAL;
	for (;;) {
		error = tsr_checkpoint_request(dev, &request);
		if (error)
			return error;
		/* All bits are set while the vGPU does not answer. */
		if (request != READ_ONCE(checkpoint->last) && request != ~0u)
			break;
		if (filp->f_flags & O_NONBLOCK)
			return -EAGAIN;
		error = wait_event_interruptible_timeout(
			checkpoint->wait, READ_ONCE(checkpoint->signalled),
			READ_ONCE(checkpoint->done) ? TSR_LOOK_DONE : TSR_LOOK_REQUEST);
		if (error < 0)
			return error;
	}
	if (put_user(request, (u32 __user *)to))
		return -EFAULT;
	WRITE_ONCE(checkpoint->last, request);
	return sizeof(request);
}

/* Ends the session, unless a program uses the vGPU. dev->lock and opening are held. */
static int tsr_checkpoint_done(struct tsr_dev *dev)
{
	if (tsr_files_any(dev) || dev->direct.state != TSR_DIRECT_CLOSED)
		return -EBUSY;
	tsr_session_stop(dev);
	if (dev->leak)
		return -EIO;
	WRITE_ONCE(dev->checkpoint.done, true);
	return 0;
}

/* Tells the device an answer. dev->lock and opening are held. */
static int tsr_checkpoint_answer(struct tsr_dev *dev, const struct tsr_answer *answer)
{
	unsigned int at;
	int error = 0;

	if (answer->state == TSQ_CHECKPOINT_STATE_DONE)
		error = tsr_checkpoint_done(dev);
	else if (answer->state == TSQ_CHECKPOINT_STATE_READY)
		WRITE_ONCE(dev->checkpoint.done, false);
	else if (answer->state != TSQ_CHECKPOINT_STATE_REFUSED)
		error = -EINVAL;
	if (error)
		return error;
	if (answer->state == TSQ_CHECKPOINT_STATE_REFUSED)
		for (at = 0; at < ARRAY_SIZE(answer->reason) && answer->reason[at]; at++)
			writel(le32_to_cpu(answer->reason[at]),
			       dev->regs + TSQ_REG_CHECKPOINT_REASON);
	writel(answer->state, dev->regs + TSQ_REG_CHECKPOINT_STATE);
	return 0;
}

static ssize_t tsr_checkpoint_write(struct file *filp, const char __user *from, size_t length,
				    loff_t *offset)
{
	struct tsr_dev *dev = filp->private_data;
	struct tsr_answer answer = {};
	int error;

	if (length < sizeof(answer.state) || length > sizeof(answer))
		return -EINVAL;
	if (copy_from_user(&answer, from, length))
		return -EFAULT;
	error = down_write_killable(&dev->checkpoint.opening);
	if (error)
		return error;
	mutex_lock(&dev->lock);
	error = dev->present ? tsr_checkpoint_answer(dev, &answer) : -ENODEV;
	mutex_unlock(&dev->lock);
	up_write(&dev->checkpoint.opening);
	wake_up_all(&dev->checkpoint.wait);
	return error ?: length;
}

static int tsr_checkpoint_open(struct inode *inode, struct file *filp)
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
	else if ((readl(dev->regs + TSQ_REG_VERSION) & 0xffff) < TSQ_MINOR_CHECKPOINT)
		error = -EOPNOTSUPP;
	else if (dev->checkpoint.open)
		error = -EBUSY;
	if (!error) {
		dev->checkpoint.open = true;
		WRITE_ONCE(dev->checkpoint.last, ~0u);
		if (!READ_ONCE(dev->checkpoint.done))
			writel(TSQ_CHECKPOINT_STATE_READY, dev->regs + TSQ_REG_CHECKPOINT_STATE);
	}
	mutex_unlock(&dev->lock);
	if (error) {
		tsr_dev_put(dev);
		return error;
	}
	filp->private_data = dev;
	return nonseekable_open(inode, filp);
}

/* Programs that are checkpointed wait for the next agent. */
static int tsr_checkpoint_release(struct inode *inode, struct file *filp)
{
	struct tsr_dev *dev = filp->private_data;

	mutex_lock(&dev->lock);
	if (dev->present && !READ_ONCE(dev->checkpoint.done))
		writel(TSQ_CHECKPOINT_STATE_NONE, dev->regs + TSQ_REG_CHECKPOINT_STATE);
	dev->checkpoint.open = false;
	mutex_unlock(&dev->lock);
	tsr_dev_put(dev);
	return 0;
}

const struct file_operations tsr_checkpoint_ops = {
	.owner = THIS_MODULE,
	.open = tsr_checkpoint_open,
	.release = tsr_checkpoint_release,
	.read = tsr_checkpoint_read,
	.write = tsr_checkpoint_write,
};
