// SPDX-License-Identifier: GPL-2.0
/* The device's answer to an ioctl: what to show and to write to the program. */
#include <linux/uaccess.h>

#include "tessera.h"

/* Returns bytes in the reply, or NULL if they are not all there. */
static const void *tsr_reply_bytes(struct tsr_request *request, u32 offset, u32 bytes)
{
	if (offset > request->bytes || bytes > request->bytes - offset)
		return NULL;
	return request->buffer->data + offset;
}

static int tsr_write_block(struct tsr_request *request, const struct tsq_block *block)
{
	u32 length = le32_to_cpu(block->length);
	const void *content = tsr_reply_bytes(request, le32_to_cpu(block->offset), length);

	if (!content)
		return -EIO;
	return copy_to_user(u64_to_user_ptr(le64_to_cpu(block->address)), content, length) ?
		-EFAULT : 0;
}

/* Carries out the answer and returns the ioctl's result. */
int tsr_done(struct tsr_ioctl *call)
{
	struct tsr_request *request = call->request;
	const struct tsq_done *done = request->buffer->data;
	u32 errno = le32_to_cpu(done->reply.error), places, writes, at, bytes;
	const void *argument;
	int error = 0;

	if (errno >= MAX_ERRNO)
		return -EIO;
	if (request->bytes < sizeof(*done))
		return errno ? -(int)errno : -EIO;
	places = le32_to_cpu(done->places);
	writes = le32_to_cpu(done->writes);
	bytes = le32_to_cpu(done->argument_bytes);
	argument = tsr_reply_bytes(request, le32_to_cpu(done->argument_offset), bytes);
	if (places > TSQ_MAX_MEMORIES || writes > TSQ_MAX_BLOCKS || !argument ||
	    bytes != call->argument_bytes)
		return -EIO;
	for (at = 0; at < places && !error; at++)
		error = tsr_place(call->file, &done->place[at]);
	for (at = 0; at < writes && !error; at++)
		error = tsr_write_block(request, &done->write[at]);
	if (!error && copy_to_user(u64_to_user_ptr(call->argument), argument, bytes))
		error = -EFAULT;
	return error ?: -(int)errno;
}
