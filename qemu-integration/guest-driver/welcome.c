// SPDX-License-Identifier: GPL-2.0
/* What the device says of itself: its nodes, its files in /proc, the shapes of ioctls. */
#include <linux/slab.h>

#include "tessera.h"

#define TSR_MAX_CALLS 1024
#define TSR_MAX_PROC_FILES 256
#define TSR_MAX_PATH 256
#define TSR_MAJOR 195
#define TSR_CONTROL_MINOR 255

/* Returns an array in the reply, or NULL if it is not all there. */
static const void *tsr_array(const void *reply, u32 bytes, u32 offset, u32 count, size_t size)
{
	if (offset % sizeof(u32) || offset > bytes || count > (bytes - offset) / size)
		return NULL;
	return reply + offset;
}

static int tsr_welcome_calls(struct tsr_dev *dev, const struct tsq_welcome *welcome, u32 bytes)
{
	u32 count = le32_to_cpu(welcome->calls), at;
	struct tsr_calls *calls, *old;
	const struct tsq_call *call;

	call = tsr_array(welcome, bytes, le32_to_cpu(welcome->calls_offset), count, sizeof(*call));
	if (!call || count > TSR_MAX_CALLS)
		return -EPROTO;
	calls = kzalloc(struct_size(calls, call, count), GFP_KERNEL);
	if (!calls)
		return -ENOMEM;
	calls->count = count;
	memcpy(calls->call, call, count * sizeof(*call));
	for (at = 0; at < count; at++) {
		if (le32_to_cpu(calls->call[at].argument_bytes) > TSR_MAX_ARGUMENT) {
			kfree(calls);
			return -EPROTO;
		}
	}
	old = rcu_replace_pointer(dev->calls, calls, lockdep_is_held(&dev->lock));
	if (old)
		kfree_rcu(old, rcu);
	return 0;
}

static int tsr_welcome_proc_file(struct tsr_dev *dev, const void *reply, u32 bytes,
				 const struct tsq_proc_file *file)
{
	u32 path_bytes = le32_to_cpu(file->path_bytes);
	u32 content_bytes = le32_to_cpu(file->content_bytes);
	u32 path_offset = le32_to_cpu(file->path_offset);
	u32 content_offset = le32_to_cpu(file->content_offset);
	char *path;
	int error;

	if (path_offset > bytes || path_bytes > bytes - path_offset || path_bytes > TSR_MAX_PATH ||
	    content_offset > bytes || content_bytes > bytes - content_offset)
		return -EPROTO;
	path = kmemdup_nul(reply + path_offset, path_bytes, GFP_KERNEL);
	if (!path)
		return -ENOMEM;
	error = tsr_proc_set(&dev->proc, path, reply + content_offset, content_bytes);
	kfree(path);
	return error;
}

static int tsr_welcome_proc(struct tsr_dev *dev, const struct tsq_welcome *welcome, u32 bytes)
{
	u32 count = le32_to_cpu(welcome->proc_files), at;
	const struct tsq_proc_file *file;
	int error;

	file = tsr_array(welcome, bytes, le32_to_cpu(welcome->proc_files_offset), count,
			 sizeof(*file));
	if (!file || count > TSR_MAX_PROC_FILES)
		return -EPROTO;
	error = tsr_proc_begin(&dev->proc);
	for (at = 0; at < count && !error; at++)
		error = tsr_welcome_proc_file(dev, welcome, bytes, &file[at]);
	return error;
}

static int tsr_welcome_nodes(struct tsr_dev *dev, const struct tsq_welcome *welcome, u32 bytes)
{
	u32 count = le32_to_cpu(welcome->minors), at;
	u32 minors[TSR_MAX_MINORS] = {};
	const __le32 *minor;

	minor = tsr_array(welcome, bytes, le32_to_cpu(welcome->minors_offset), count,
			  sizeof(*minor));
	if (!minor || count > TSR_MAX_MINORS ||
	    le32_to_cpu(welcome->rm_major) != TSR_MAJOR ||
	    le32_to_cpu(welcome->control_minor) != TSR_CONTROL_MINOR)
		return -EPROTO;
	for (at = 0; at < count; at++) {
		minors[at] = le32_to_cpu(minor[at]);
		if (minors[at] >= TSR_CONTROL_MINOR)
			return -EPROTO;
	}
	if (dev->nodes && count == dev->minors && !memcmp(minors, dev->minor, sizeof(minors)))
		return 0;
	tsr_nodes_remove(dev);
	dev->minors = count;
	memcpy(dev->minor, minors, sizeof(minors));
	return tsr_nodes_add(dev);
}

/* Takes the reply to HELLO. dev->lock is held. */
int tsr_welcome(struct tsr_dev *dev, const void *reply, u32 bytes)
{
	const struct tsq_welcome *welcome = reply;
	int error;

	if (bytes < sizeof(*welcome) || le32_to_cpu(welcome->version) >> 16 != TSQ_VERSION >> 16)
		return -EPROTO;
	error = tsr_welcome_calls(dev, welcome, bytes);
	if (!error)
		error = tsr_welcome_proc(dev, welcome, bytes);
	if (!error)
		error = tsr_welcome_nodes(dev, welcome, bytes);
	return error;
}
