// SPDX-License-Identifier: GPL-2.0
/* What the device asks for to carry out an ioctl: memory, files and pages of the program. */
#include <linux/file.h>

#include "tessera.h"

/* Adds a block of the program's memory, which is read when the request is written. */
int tsr_add_block(struct tsr_ioctl *call, u64 address, u64 length)
{
	u32 at;

	for (at = 0; at < call->blocks; at++)
		if (le64_to_cpu(call->block[at].address) == address &&
		    le64_to_cpu(call->block[at].length) == length)
			return 0;
	if (call->blocks == TSQ_MAX_BLOCKS || length > call->room)
		return -EINVAL;
	call->room -= length;
	call->block[call->blocks].address = cpu_to_le64(address);
	call->block[call->blocks++].length = cpu_to_le64(length);
	return 0;
}

/* Returns the id of a file of the same session, or 0. */
static u64 tsr_file_id(struct tsr_ioctl *call, s32 fd)
{
	struct file *filp = fd < 0 ? NULL : fget(fd);
	u64 id = 0;

	if (!filp)
		return 0;
	if (filp->f_op == &tsr_file_ops) {
		const struct tsr_file *file = filp->private_data;

		if (file->dev == call->file->dev && file->session == call->file->session)
			id = file->id;
	}
	fput(filp);
	return id;
}

/* Adds the file of a descriptor. */
int tsr_add_file(struct tsr_ioctl *call, s32 fd)
{
	u64 id = tsr_file_id(call, fd);
	u32 at;

	for (at = 0; at < call->files; at++)
		if ((s32)le32_to_cpu((__force __le32)call->fd[at].fd) == fd)
			return 0;
	if (!id)
		return -EBADF;
	if (call->files == TSQ_MAX_FILES)
		return -EINVAL;
	call->fd[call->files].fd = (__force __s32)cpu_to_le32(fd);
	call->fd[call->files++].file = cpu_to_le64(id);
	return 0;
}

static int tsr_add_memory(struct tsr_ioctl *call, struct tsr_memory *memory)
{
	if (IS_ERR(memory))
		return PTR_ERR(memory);
	call->memory[call->memories++] = memory;
	return 0;
}

static int tsr_fetch_files(struct tsr_ioctl *call, u32 count)
{
	int error;
	u32 at;

	for (at = 0; at < count; at++) {
		__s32 fd = call->fetch.file[at];

		error = tsr_add_file(call, (s32)le32_to_cpu((__force __le32)fd));
		if (error == -EBADF) {
			if (call->refused_files == TSQ_MAX_FILES)
				return -EINVAL;
			call->refused_file[call->refused_files++] = fd;
		} else if (error) {
			return error;
		}
	}
	return 0;
}

static int tsr_fetch_pins(struct tsr_ioctl *call, u32 count)
{
	struct tsr_file *file = call->file;
	int error;
	u32 at;

	for (at = 0; at < count; at++) {
		const struct tsq_range *range = &call->fetch.pin[at];

		if (call->memories == TSQ_MAX_MEMORIES)
			return -EINVAL;
		error = tsr_add_memory(call, tsr_memory_pin(file->dev, file->session,
							    le64_to_cpu(range->address),
							    le64_to_cpu(range->length)));
		if (error == -EINTR || error == -EIO)
			return error;
		if (error) {
			if (call->refused_pins == TSQ_MAX_MEMORIES)
				return -EINVAL;
			call->refused_pin[call->refused_pins++] = *range;
		}
	}
	return 0;
}

static int tsr_fetch_allocations(struct tsr_ioctl *call, u32 count)
{
	struct tsr_file *file = call->file;
	int error;
	u32 at;

	for (at = 0; at < count; at++) {
		u64 length = le64_to_cpu(call->fetch.allocate[at]);

		if (call->memories == TSQ_MAX_MEMORIES)
			return -EINVAL;
		error = tsr_add_memory(call, tsr_memory_allocate(file->dev, file->session,
								 length));
		if (error)
			return error;
	}
	return 0;
}

/* Adds what the device's reply FETCH asks for. */
int tsr_fetch(struct tsr_ioctl *call)
{
	struct tsq_fetch *fetch = &call->fetch;
	u32 blocks, files, pins, allocations, at;
	int error = 0;

	/* The buffer is written again: the reply is not all in it then. */
	if (call->request->bytes < sizeof(*fetch))
		return -EIO;
	memcpy(fetch, call->request->buffer->data, sizeof(*fetch));
	blocks = le32_to_cpu(fetch->blocks);
	files = le32_to_cpu(fetch->files);
	pins = le32_to_cpu(fetch->pins);
	allocations = le32_to_cpu(fetch->allocations);
	if (blocks > TSQ_MAX_BLOCKS || files > TSQ_MAX_FILES || pins > TSQ_MAX_MEMORIES ||
	    allocations > TSQ_MAX_MEMORIES)
		return -EIO;
	for (at = 0; at < blocks && !error; at++)
		error = tsr_add_block(call, le64_to_cpu(fetch->block[at].address),
				      le64_to_cpu(fetch->block[at].length));
	if (!error)
		error = tsr_fetch_files(call, files);
	if (!error)
		error = tsr_fetch_pins(call, pins);
	if (!error)
		error = tsr_fetch_allocations(call, allocations);
	return error;
}
