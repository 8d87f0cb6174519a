// SPDX-License-Identifier: GPL-2.0
/* Open files of the device nodes. */
#include <linux/cred.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>

#include "tessera.h"

static void tsr_file_add(struct tsr_file *file)
{
	struct tsr_dev *dev = file->dev;
	unsigned long flags;

	spin_lock_irqsave(&dev->files_lock, flags);
	hash_add(dev->files, &file->link, file->id);
	spin_unlock_irqrestore(&dev->files_lock, flags);
}

static void tsr_file_remove(struct tsr_file *file)
{
	struct tsr_dev *dev = file->dev;
	unsigned long flags;

	spin_lock_irqsave(&dev->files_lock, flags);
	if (!hlist_unhashed(&file->link))
		hash_del(&file->link);
	spin_unlock_irqrestore(&dev->files_lock, flags);
}

/* Notes an event of a file, and wakes those who wait for it. */
void tsr_file_event(struct tsr_dev *dev, u64 id)
{
	struct tsr_file *file;
	unsigned long flags;

	spin_lock_irqsave(&dev->files_lock, flags);
	hash_for_each_possible(dev->files, file, link, id) {
		if (file->id == id) {
			WRITE_ONCE(file->event, true);
			wake_up(&file->wait);
		}
	}
	spin_unlock_irqrestore(&dev->files_lock, flags);
}

/* Wakes all who wait for events, after the end of a session. */
void tsr_files_wake(struct tsr_dev *dev)
{
	struct tsr_file *file;
	unsigned int bucket;

	spin_lock_irq(&dev->files_lock);
	hash_for_each(dev->files, bucket, file, link)
		wake_up_all(&file->wait);
	spin_unlock_irq(&dev->files_lock);
}

/* Returns whether a file is open. */
bool tsr_files_any(struct tsr_dev *dev)
{
	bool any;

	spin_lock_irq(&dev->files_lock);
	any = !hash_empty(dev->files);
	spin_unlock_irq(&dev->files_lock);
	return any;
}

/* Closes a file that a killed process was about to open. */
static void tsr_open_orphan(struct tsr_request *request)
{
	const struct tsq_opened *opened = request->buffer->data;

	if (!request->error && request->bytes >= sizeof(*opened) && !opened->reply.error) {
		request->abandoned = false;
		tsr_request_begin(request, TSQ_OP_CLOSE, le64_to_cpu(opened->file),
				  sizeof(struct tsq_request));
		if (!tsr_submit(request, false))
			wait_for_completion(&request->done);
	}
	tsr_request_free(request);
}

/* Opens the file at the device. */
static int tsr_open_at_device(struct tsr_file *file, u32 node, u32 minor)
{
	const struct tsq_opened *opened;
	struct tsr_request *request;
	struct tsq_open *open;
	int error;

	file->session = READ_ONCE(file->dev->session);
	request = tsr_request_new(file->dev, file->session, 1);
	if (IS_ERR(request))
		return PTR_ERR(request);
	request->orphan = tsr_open_orphan;
	open = tsr_request_begin(request, TSQ_OP_OPEN, 0, sizeof(*open));
	open->node = cpu_to_le32(node);
	open->minor = cpu_to_le32(minor);
	open->process = cpu_to_le32(task_tgid_nr(current));
	/* Programs of one user may share memory with each other. */
	open->user = cpu_to_le32(from_kuid(&init_user_ns, current_euid()) + 1);
	error = tsr_call(request);
	if (error)
		return error;
	opened = request->buffer->data;
	if (request->bytes < sizeof(*opened) || !opened->file) {
		tsr_request_free(request);
		return -EIO;
	}
	file->id = le64_to_cpu(opened->file);
	/* Its buffer closes the file. */
	request->orphan = NULL;
	file->close = request;
	return 0;
}

static int tsr_file_open(struct inode *inode, struct file *filp)
{
	struct tsr_dev *dev = tsr_dev_get();
	struct tsr_file *file;
	u32 node, minor;
	int error;

	if (!dev)
		return -ENODEV;
	error = tsr_node_of(inode, &node, &minor);
	if (!error)
		error = tsr_checkpoint_begin_open(dev);
	if (error) {
		tsr_dev_put(dev);
		return error;
	}
	error = tsr_session_ensure(dev);
	file = error ? NULL : kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	if (!file) {
		error = error ?: -ENOMEM;
		goto out;
	}
	file->dev = dev;
	file->uvm = node == TSQ_NODE_UVM;
	init_waitqueue_head(&file->wait);
	mutex_init(&file->places_lock);
	INIT_LIST_HEAD(&file->places);
	error = tsr_open_at_device(file, node, minor);
	if (error) {
		kfree(file);
		goto out;
	}
	tsr_file_add(file);
	/* One address space for all nodes, also those that a program has made. */
	filp->f_mapping = dev->inode->i_mapping;
	filp->private_data = file;
	error = nonseekable_open(inode, filp);
out:
	tsr_checkpoint_end_open(dev);
	if (error)
		tsr_dev_put(dev);
	return error;
}

static void tsr_close_orphan(struct tsr_request *request)
{
	tsr_request_free(request);
}

/* Closes the file. Waits: programs rely on memory to be free then. */
static int tsr_file_release(struct inode *inode, struct file *filp)
{
	struct tsr_file *file = filp->private_data;
	struct tsr_request *request = file->close;
	struct tsr_dev *dev = file->dev;

	tsr_file_remove(file);
	tsr_places_drop(file, 0, U64_MAX);
	tsr_request_begin(request, TSQ_OP_CLOSE, file->id, sizeof(struct tsq_request));
	request->orphan = tsr_close_orphan;
	if (tsr_submit(request, false) || tsr_wait(request) != TSR_ABANDONED)
		tsr_request_free(request);
	kfree(file);
	tsr_dev_put(dev);
	return 0;
}

static __poll_t tsr_file_poll(struct file *filp, struct poll_table_struct *table)
{
	struct tsr_file *file = filp->private_data;

	poll_wait(filp, &file->wait, table);
	if (!tsr_session_is(file->dev, file->session))
		return EPOLLERR | EPOLLHUP;
	/* As with NVIDIA's driver, a poll takes the event. */
	if (xchg(&file->event, false))
		return EPOLLIN | EPOLLPRI;
	return 0;
}

const struct file_operations tsr_file_ops = {
	.owner = THIS_MODULE,
	.open = tsr_file_open,
	.release = tsr_file_release,
	.unlocked_ioctl = tsr_file_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = tsr_file_mmap,
	.poll = tsr_file_poll,
};
