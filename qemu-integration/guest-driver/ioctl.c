// SPDX-License-Identifier: GPL-2.0
/*
 * ioctls: the argument and what it points to go to the device, which may ask for more of the
 * program, and says what to write back.
 */
#include <linux/delay.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "tessera.h"

/* Pause before an ioctl is repeated. */
#define TSR_AGAIN_MS 10

/* Finds the shape of an ioctl's argument. */
static bool tsr_shape(struct tsr_ioctl *call, struct tsq_call *shape)
{
	u32 node = call->file->uvm ? TSQ_CALL_UVM : TSQ_CALL_RM;
	u32 number = call->file->uvm ? call->number : call->number & 0xff;
	const struct tsr_calls *calls;
	bool found = false;
	u32 at;

	rcu_read_lock();
	calls = rcu_dereference(call->file->dev->calls);
	for (at = 0; calls && at < calls->count && !found; at++) {
		*shape = calls->call[at];
		found = le32_to_cpu(shape->nodes) == node && le32_to_cpu(shape->number) == number;
		if (found && !call->file->uvm &&
		    (le32_to_cpu(shape->flags) & TSQ_CALL_HAS_LENGTH))
			found = le32_to_cpu(shape->argument_bytes) == _IOC_SIZE(call->number);
	}
	rcu_read_unlock();
	return found;
}

/* Reads a field of the argument. A shape that does not fit has no such field. */
static int tsr_field(struct tsr_ioctl *call, u32 offset, void *field, u32 bytes)
{
	if (offset > call->argument_bytes || bytes > call->argument_bytes - offset)
		return -ENOENT;
	return copy_from_user(field, u64_to_user_ptr(call->argument + offset), bytes) ?
		-EFAULT : 0;
}

/* Adds what the argument points to. */
static int tsr_add_shape(struct tsr_ioctl *call, const struct tsq_call *shape)
{
	u32 flags = le32_to_cpu(shape->flags);
	__le64 pointer;
	__le32 length;
	__le32 fd;
	int error = 0;

	if (flags & TSQ_CALL_HAS_BLOCK) {
		error = tsr_field(call, le32_to_cpu(shape->pointer), &pointer, sizeof(pointer));
		if (!error)
			error = tsr_field(call, le32_to_cpu(shape->length), &length,
					  sizeof(length));
		/* The device refuses an argument without the block. */
		if (!error && pointer && length && le32_to_cpu(length) <= call->room)
			error = tsr_add_block(call, le64_to_cpu(pointer), le32_to_cpu(length));
		if (error && error != -ENOENT)
			return error;
	}
	if (flags & TSQ_CALL_HAS_FD) {
		error = tsr_field(call, le32_to_cpu(shape->fd), &fd, sizeof(fd));
		if (!error && (s32)le32_to_cpu(fd) >= 0)
			error = tsr_add_file(call, (s32)le32_to_cpu(fd));
		/* Another kind of file is left out. */
		if (error == -ENOENT || error == -EBADF)
			error = 0;
	}
	return error;
}

static u32 tsr_align(u32 bytes)
{
	return ALIGN(bytes, 8);
}

/* Copies memory of the program into the request. */
static int tsr_put(struct tsr_ioctl *call, u64 address, u32 bytes, __le32 *offset)
{
	struct tsr_request *request = call->request;
	u32 at = tsr_align(request->bytes);

	if (at > TSQ_MAX_PAGES * PAGE_SIZE || bytes > TSQ_MAX_PAGES * PAGE_SIZE - at)
		return -EINVAL;
	if (copy_from_user(request->buffer->data + at, u64_to_user_ptr(address), bytes))
		return -EFAULT;
	*offset = cpu_to_le32(at);
	request->bytes = at + bytes;
	return 0;
}

static void tsr_put_memories(struct tsr_ioctl *call, struct tsq_ioctl *message)
{
	u32 at;

	message->memories = cpu_to_le32(call->memories);
	for (at = 0; at < call->memories; at++) {
		const struct tsr_memory *memory = call->memory[at];
		struct tsq_memory *to = &message->memory[at];

		to->id = cpu_to_le64(memory->id);
		to->address = cpu_to_le64(memory->address);
		to->length = cpu_to_le64((u64)memory->pages << PAGE_SHIFT);
		/* Stays readable after the session's end, when the request is refused. */
		to->list = cpu_to_le64(memory->list_dma.range[0].address);
		to->kind = cpu_to_le32(memory->pinned ? TSQ_MEMORY_PINNED : TSQ_MEMORY_ALLOCATED);
	}
}

/* Writes the request, with all that was added to the call. */
static int tsr_build(struct tsr_ioctl *call)
{
	struct tsq_ioctl *message;
	int error;
	u32 at;

	message = tsr_request_begin(call->request, TSQ_OP_IOCTL, call->file->id, sizeof(*message));
	message->number = cpu_to_le32(call->number);
	message->argument_bytes = cpu_to_le32(call->argument_bytes);
	error = tsr_put(call, call->argument, call->argument_bytes, &message->argument_offset);
	for (at = 0; at < call->blocks && !error; at++) {
		u64 address = le64_to_cpu(call->block[at].address);
		u32 length = le64_to_cpu(call->block[at].length);

		message->block[at].address = cpu_to_le64(address);
		message->block[at].length = cpu_to_le32(length);
		error = tsr_put(call, address, length, &message->block[at].offset);
	}
	message->blocks = cpu_to_le32(call->blocks);
	message->files = cpu_to_le32(call->files);
	memcpy(message->file, call->fd, sizeof(call->fd));
	tsr_put_memories(call, message);
	message->refused_files = cpu_to_le32(call->refused_files);
	memcpy(message->refused_file, call->refused_file, sizeof(call->refused_file));
	message->refused_pins = cpu_to_le32(call->refused_pins);
	memcpy(message->refused_pin, call->refused_pin, sizeof(call->refused_pin));
	return error;
}

/* Frees a call. Memory that the device did not take is freed. */
void tsr_ioctl_drop(struct tsr_ioctl *call)
{
	u32 at;

	for (at = 0; at < call->memories; at++) {
		tsr_memory_take_back(call->memory[at]);
		tsr_memory_put(call->memory[at]);
	}
	tsr_request_free(call->request);
	kvfree(call);
}

/* Leaves the memory of a call to the device, which has answered DONE. */
static void tsr_leave_memories(struct tsr_ioctl *call)
{
	while (call->memories) {
		struct tsr_memory *memory = call->memory[--call->memories];

		tsr_memory_free_list(memory);
		tsr_memory_put(memory);
	}
}

/* Finishes an ioctl whose process was killed. Its file may be gone. */
static void tsr_ioctl_orphan(struct tsr_request *request)
{
	struct tsr_ioctl *call = request->context;
	const struct tsq_reply *reply = request->buffer->data;

	if (!request->error && le32_to_cpu(reply->result) == TSQ_RESULT_DONE)
		tsr_leave_memories(call);
	tsr_ioctl_drop(call);
}

/* Sends the call until the device needs nothing more. */
static int tsr_carry_out(struct tsr_ioctl *call)
{
	struct tsr_request *request = call->request;
	const struct tsq_reply *reply = request->buffer->data;
	int error, round;

	for (round = 0; round <= TSQ_MAX_FETCHES; round++) {
		error = tsr_build(call);
		if (!error)
			error = tsr_submit(request, true);
		if (!error)
			error = tsr_wait(request);
		if (error)
			return error;
		switch (le32_to_cpu(reply->result)) {
		case TSQ_RESULT_DONE:
			tsr_leave_memories(call);
			return tsr_done(call);
		case TSQ_RESULT_FETCH:
			error = tsr_fetch(call);
			if (error)
				return error;
			break;
		default:
			return -EIO;
		}
	}
	return -EIO;
}

static int tsr_ioctl_once(struct file *filp, unsigned int number, unsigned long argument)
{
	struct tsr_file *file = filp->private_data;
	struct tsq_call shape;
	struct tsr_ioctl *call;
	bool shaped;
	int error;

	if (!tsr_session_is(file->dev, file->session))
		return -EIO;
	call = kvzalloc(sizeof(*call), GFP_KERNEL_ACCOUNT);
	if (!call)
		return -ENOMEM;
	call->file = file;
	call->number = number;
	call->argument = argument;
	call->argument_bytes = file->uvm ? 0 : _IOC_SIZE(number);
	shaped = tsr_shape(call, &shape);
	if (shaped && (le32_to_cpu(shape.flags) & TSQ_CALL_HAS_LENGTH))
		call->argument_bytes = le32_to_cpu(shape.argument_bytes);
	else if (shaped)
		call->argument_bytes = _IOC_SIZE(number);
	/* What is left for blocks, with their alignment. */
	call->room = TSQ_MAX_PAGES * PAGE_SIZE - sizeof(struct tsq_ioctl) -
		     8 * (TSQ_MAX_BLOCKS + 1) - tsr_align(call->argument_bytes);
	call->request = tsr_request_new(file->dev, file->session, TSQ_MAX_PAGES);
	if (IS_ERR(call->request)) {
		error = PTR_ERR(call->request);
		kvfree(call);
		return error;
	}
	call->request->orphan = tsr_ioctl_orphan;
	call->request->context = call;
	error = shaped ? tsr_add_shape(call, &shape) : 0;
	if (!error)
		error = tsr_carry_out(call);
	/* The process was killed: the call is freed when the device has answered. */
	if (error == TSR_ABANDONED)
		return -EINTR;
	tsr_ioctl_drop(call);
	return error;
}

/* Repeats an ioctl that the device carries out later, such as a new channel soon after faults. */
long tsr_file_ioctl(struct file *filp, unsigned int number, unsigned long argument)
{
	int error;

	do
		error = tsr_ioctl_once(filp, number, argument);
	while (error == -EAGAIN && !msleep_interruptible(TSR_AGAIN_MS));
	return error == -EAGAIN ? -ERESTARTSYS : error;
}
