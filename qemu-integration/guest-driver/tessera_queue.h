/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Control queue of a Tessera vGPU: the device files of NVIDIA's driver, for programs in a VM.
 *
 * The driver in the guest is a transport. It passes what programs do with the device files to the
 * device, and knows no command of NVIDIA's driver. docs/device-interface.md describes the use of
 * these definitions; mdev-core/src/abi/queue.rs has the same in Rust.
 *
 * All values are little-endian and naturally aligned. Reserved fields are zero. All addresses named
 * "guest-physical" are addresses of DMA.
 */
#ifndef TESSERA_QUEUE_H
#define TESSERA_QUEUE_H

#ifdef __KERNEL__
#include <linux/types.h>
#else
#include <stdint.h>
typedef uint16_t __le16;
typedef uint32_t __le32;
typedef uint64_t __le64;
typedef int32_t __s32;
#endif

/* ---- Registers in BAR 3 (32 bits each) ------------------------------------------------------- */

#define TSQ_REG_MAGIC		0x000	/* TSQ_MAGIC */
#define TSQ_REG_VERSION		0x004	/* major << 16 | minor; refuse another major than 1 */
#define TSQ_REG_FEATURES	0x008	/* bit TSQ_FEATURE_QUEUE: the vGPU has the queue */
#define TSQ_REG_STATUS		0x00c	/* bit 0 ready, bit 1 GPU lost */
#define TSQ_REG_INTR_STATUS	0x010	/* pending, write 1 to clear: TSQ_INTR_* */
#define TSQ_REG_INTR_ENABLE	0x014	/* pending bits that interrupt */
#define TSQ_REG_WAKE		0x030	/* write any value: wakes a sleeping engine */
#define TSQ_REG_QUEUE_VERSION	0x040	/* RO: TSQ_VERSION, or 0 without the queue */
#define TSQ_REG_QUEUE_STATUS	0x044	/* RO: TSQ_STATE_* in bits 7:0, TSQ_ERROR_* in bits 15:8 */
#define TSQ_REG_QUEUE_BASE_LO	0x048	/* RW: guest-physical address of the queue, page-aligned */
#define TSQ_REG_QUEUE_BASE_HI	0x04c	/* RW: upper half */
#define TSQ_REG_QUEUE_SLOTS	0x050	/* RW: submissions in the ring, a power of two, 8 to 256 */
#define TSQ_REG_QUEUE_CONTROL	0x054	/* RW: TSQ_CONTROL_ENABLE */
#define TSQ_REG_QUEUE_NOTIFY	0x058	/* WO: any value: there are new submissions. Never waits */

#define TSQ_REG_CHECKPOINT_REQUEST 0x05c	/* RO: number of the request; TSQ_CHECKPOINT_WANTED */
#define TSQ_REG_CHECKPOINT_STATE 0x060	/* RW: TSQ_CHECKPOINT_STATE_* */
#define TSQ_REG_CHECKPOINT_REASON 0x064	/* WO: the next 4 bytes of a refusal's reason */

#define TSQ_MAGIC		0x41525354u	/* "TSRA" */
#define TSQ_VERSION		0x00010001u	/* major << 16 | minor; refuse another major */
#define TSQ_FEATURE_QUEUE	(1u << 8)

#define TSQ_INTR_NONSTALL	(1u << 0)	/* leave disabled: events arrive by the queue */
#define TSQ_INTR_CHANNEL_ERROR	(1u << 1)	/* leave disabled: events arrive by the queue */
#define TSQ_INTR_LOST		(1u << 2)
#define TSQ_INTR_QUEUE		(1u << 3)	/* new completions, or another state. MSI vector 0 */

/*
 * Writing 1 starts the queue at BASE with SLOTS, from new indices; the guest zeroes the queue's
 * memory before. Writing 0 stops it: all files are closed, and the device no longer uses memory of
 * the guest when the state is TSQ_STATE_OFF. Both take time: wait for the state, by the interrupt or
 * by polling. A function-level reset stops it as well, and is complete when the write is complete.
 */
#define TSQ_CONTROL_ENABLE	(1u << 0)

/*
 * The host asks for a checkpoint of the programs, so that the vGPU can be saved. Each request has
 * another number in REQUEST, and its change raises TSQ_INTR_QUEUE. The guest answers in STATE:
 * DONE when no file is open and the queue is off, or REFUSED after the reason. At an even number,
 * which a restored vGPU has from the start, it sets READY and restores the programs.
 */
#define TSQ_MINOR_CHECKPOINT	2	/* minor version in VERSION that has these registers */
#define TSQ_CHECKPOINT_WANTED	1u	/* bit of REQUEST: the programs are to be checkpointed */
#define TSQ_CHECKPOINT_STATE_NONE 0	/* no agent */
#define TSQ_CHECKPOINT_STATE_READY 1	/* an agent waits for requests */
#define TSQ_CHECKPOINT_STATE_DONE 2
#define TSQ_CHECKPOINT_STATE_REFUSED 3
#define TSQ_CHECKPOINT_REASON_BYTES 128	/* of UTF-8; the device drops more */

#define TSQ_STATE_OFF		0
#define TSQ_STATE_STARTING	1
#define TSQ_STATE_RUNNING	2
#define TSQ_STATE_STOPPING	3
#define TSQ_STATE_FAILED	4	/* nothing is served; write 0 to CONTROL, or reset */

#define TSQ_ERROR_NONE		0
#define TSQ_ERROR_CONFIG	1	/* BASE or SLOTS is invalid, or not in RAM of the device */
#define TSQ_ERROR_RING		2	/* an index is impossible */
#define TSQ_ERROR_ACCESS	3	/* a buffer is not in RAM that the device can read and write */
#define TSQ_ERROR_SUBMISSION	4	/* a submission or a request has an invalid form */
#define TSQ_ERROR_LOST		5	/* the GPU is lost */
#define TSQ_ERROR_HOST		6	/* the host failed; its log has the cause */

/* ---- Memory of the queue --------------------------------------------------------------------- */

/*
 * Physically contiguous, at BASE:
 *
 *   TSQ_INDICES      struct tsq_indices
 *   TSQ_SUBMISSIONS  struct tsq_submission[SLOTS]
 *   behind these     struct tsq_completion[TSQ_COMPLETIONS_PER_SLOT * SLOTS]
 *
 * Indices count up and wrap at 2^32; entry = index modulo the entries of the ring. A ring is empty
 * when head == tail. Write entries first, then a write barrier, then the tail; then NOTIFY. At most
 * SLOTS submissions are between head and tail.
 */
#define TSQ_INDICES		0x0000
#define TSQ_SUBMISSIONS		0x1000
#define TSQ_COMPLETIONS_PER_SLOT 4

struct tsq_indices {
	__le32 submit_tail;		/* written by the guest */
	__le32 reserved0[15];
	__le32 submit_head;		/* written by the device: submissions that it has read */
	__le32 reserved1[15];
	__le32 complete_tail;		/* written by the device */
	__le32 reserved2[15];
	__le32 complete_head;		/* written by the guest: completions that it has read */
	__le32 reserved3[15];
};

/*
 * A request. Its buffer consists of 4096-byte pages anywhere. It belongs to the device until the
 * completion; the reply replaces the request from the buffer's start. The list of the pages'
 * guest-physical addresses is an array of __le64, 8-byte aligned; it belongs to the device until
 * submit_head has passed the submission. Requests complete in any order.
 */
struct tsq_submission {
	__le64 list;			/* guest-physical address of the array of page addresses */
	__le32 pages;			/* 1 to TSQ_MAX_PAGES; HELLO and IOCTL need TSQ_MAX_PAGES */
	__le32 bytes;			/* length of the request */
	__le64 cookie;			/* comes back in the completion */
	__le64 reserved;
};

#define TSQ_PAGE_BYTES		4096
#define TSQ_MAX_PAGES		32

/* A completion or an event. While the ring is full, the device keeps what is to come. */
struct tsq_completion {
	__le32 kind;			/* TSQ_COMPLETION_* */
	__le32 bytes;			/* DONE: length of the reply in the buffer */
	__le64 value;			/* see the kinds */
	__le64 reserved[2];
};

#define TSQ_COMPLETION_DONE	1	/* a request is complete; value: its cookie */
#define TSQ_COMPLETION_EVENT	2	/* a file is ready for poll(); value: the file's id */
#define TSQ_COMPLETION_MEMORY	3	/* the device no longer uses a memory; value: its id */
#define TSQ_COMPLETION_WITHDRAW	4	/* withdraw the doorbell page; value: a generation */

/* ---- Requests --------------------------------------------------------------------------------- */

/* Start of each request. */
struct tsq_request {
	__le32 opcode;			/* TSQ_OP_* */
	__le32 reserved;
	__le64 file;			/* CLOSE, IOCTL, MAP: id of the file; otherwise 0 */
};

/* Start of each reply. */
struct tsq_reply {
	__le32 result;			/* TSQ_RESULT_* */
	__le32 error;			/* errno (Linux numbers, positive), or 0 */
};

#define TSQ_RESULT_DONE		0
#define TSQ_RESULT_FETCH	1	/* IOCTL only: struct tsq_fetch */

#define TSQ_OP_HELLO		1	/* struct tsq_request -> struct tsq_welcome */
#define TSQ_OP_OPEN		2	/* struct tsq_open -> struct tsq_opened */
#define TSQ_OP_CLOSE		3	/* struct tsq_request -> struct tsq_reply */
#define TSQ_OP_IOCTL		4	/* struct tsq_ioctl -> struct tsq_done or struct tsq_fetch */
#define TSQ_OP_MAP		5	/* struct tsq_map -> struct tsq_mapped */
#define TSQ_OP_WITHDRAWN	6	/* struct tsq_withdrawn -> struct tsq_reply */

/* Maximum numbers of entries in requests and replies. */
#define TSQ_MAX_BLOCKS		16
#define TSQ_MAX_FILES		16
#define TSQ_MAX_MEMORIES	16
/* Maximum number of TSQ_RESULT_FETCH for one ioctl. Fail with EIO after that. */
#define TSQ_MAX_FETCHES		8

/* -- HELLO: what programs see. It does not change while the queue runs. */
struct tsq_welcome {
	struct tsq_reply reply;
	__le32 version;			/* TSQ_VERSION */
	__le32 rm_major;		/* major number of /dev/nvidiactl and /dev/nvidiaN: 195 */
	__le32 control_minor;		/* minor number of /dev/nvidiactl: 255 */
	__le32 minors;			/* number of __le32 at minors_offset: the /dev/nvidiaN */
	__le32 minors_offset;		/* offsets are from the start of the reply */
	__le32 calls;			/* number of struct tsq_call at calls_offset */
	__le32 calls_offset;
	__le32 proc_files;		/* number of struct tsq_proc_file at proc_files_offset */
	__le32 proc_files_offset;
	__le32 reserved;
};

/* Where the argument of an ioctl has a pointer and a descriptor. The first match counts. */
struct tsq_call {
	__le32 nodes;			/* TSQ_CALL_RM or TSQ_CALL_UVM */
	__le32 number;			/* RM: low byte of the request; UVM: all of the request */
	__le32 flags;			/* TSQ_CALL_HAS_* */
	__le32 argument_bytes;		/* HAS_LENGTH. RM: only requests whose _IOC_SIZE it is */
	__le32 pointer;			/* HAS_BLOCK: offset of a 64-bit address in the argument ... */
	__le32 length;			/* ... and of the 32-bit length of what is there */
	__le32 fd;			/* HAS_FD: offset of a 32-bit descriptor */
	__le32 reserved;
};

#define TSQ_CALL_RM		1	/* /dev/nvidiactl and /dev/nvidiaN */
#define TSQ_CALL_UVM		2	/* /dev/nvidia-uvm */
/* Without it, the argument's length is _IOC_SIZE, bits 29:16 of the request. */
#define TSQ_CALL_HAS_LENGTH	(1u << 0)
#define TSQ_CALL_HAS_BLOCK	(1u << 1)
#define TSQ_CALL_HAS_FD		(1u << 2)
/* A request without a shape has _IOC_SIZE bytes on RM's nodes, and none on nvidia-uvm. */

/* A file below /proc/driver/nvidia; its path is relative to that, without NUL. */
struct tsq_proc_file {
	__le32 path_offset;
	__le32 path_bytes;
	__le32 content_offset;
	__le32 content_bytes;
};

/* -- OPEN: a device node was opened. Several open() are several files; dup() and fork() are not. */
struct tsq_open {
	struct tsq_request request;
	__le32 node;			/* TSQ_NODE_* */
	__le32 minor;			/* of TSQ_NODE_GPU */
	__le32 process;			/* thread group id of the opener, which nvidia-smi shows */
	__le32 user;			/* effective user id plus 1, or 0: not told */
};

#define TSQ_NODE_CONTROL	1	/* /dev/nvidiactl */
#define TSQ_NODE_GPU		2	/* /dev/nvidiaN */
#define TSQ_NODE_UVM		3	/* /dev/nvidia-uvm */

struct tsq_opened {
	struct tsq_reply reply;
	__le64 file;			/* id of the file, not 0 */
};

/*
 * -- CLOSE: the last reference to the file is gone. There is no message for the end of a process:
 * its files are closed.
 */

/* -- IOCTL: the device answers FETCH if it needs more; repeat the request with that added. */
struct tsq_range {
	__le64 address;			/* of the program */
	__le64 length;
};

struct tsq_block {
	__le64 address;			/* of the program */
	__le32 length;
	__le32 offset;			/* of the content in the request or reply, at least the header's */
};

struct tsq_file {
	__s32 fd;			/* descriptor of the program (little-endian) */
	__le32 reserved;
	__le64 file;			/* id of the file that it is */
};

/*
 * Pages for the device: allocated by the guest for it, or pinned pages of the program. The guest
 * chooses the id, which no other memory in use has. The memory belongs to the device from the reply
 * DONE on, until TSQ_COMPLETION_MEMORY says that it does not need it (any more), which may come
 * before the reply is read. With the reply FETCH it does not belong to the device: give it again.
 */
struct tsq_memory {
	__le64 id;			/* not 0 */
	__le64 address;			/* PINNED: page-aligned address of the program; otherwise 0 */
	__le64 length;			/* a multiple of 4096: the sum of the ranges */
	__le64 list;			/* guest-physical address of the first struct tsq_list */
	__le32 kind;			/* TSQ_MEMORY_* */
	__le32 reserved;
};

#define TSQ_MEMORY_ALLOCATED	1	/* zeroed pages, for tsq_fetch.allocate */
#define TSQ_MEMORY_PINNED	2	/* the program's pages, for tsq_fetch.pin */

/* A page with a part of a page list. Read once, when the request is carried out. */
#define TSQ_LIST_RANGES		255
struct tsq_list {
	__le64 next;			/* guest-physical address of the next, page-aligned, or 0 */
	__le32 count;			/* number of ranges, 1 to TSQ_LIST_RANGES */
	__le32 reserved;
	struct {
		__le64 address;		/* guest-physical, page-aligned */
		__le64 length;		/* a multiple of 4096, not 0 */
	} range[TSQ_LIST_RANGES];
};
/* Join neighbouring pages to ranges, and prefer blocks of 2 MiB: a range costs a mapping. */
#define TSQ_MAX_RANGES		(1u << 18)	/* of one memory */

struct tsq_ioctl {
	struct tsq_request request;
	__le32 number;			/* request number as the program passed it */
	__le32 argument_bytes;		/* 0 if its length is unknown */
	__le32 argument_offset;		/* offset of the argument in the request */
	__le32 blocks;
	__le32 files;
	__le32 memories;
	__le32 refused_files;		/* of tsq_fetch.file: descriptors that are no files of the device */
	__le32 refused_pins;		/* of tsq_fetch.pin: ranges that cannot be pinned */
	struct tsq_block block[TSQ_MAX_BLOCKS];
	struct tsq_file file[TSQ_MAX_FILES];
	struct tsq_memory memory[TSQ_MAX_MEMORIES];
	__s32 refused_file[TSQ_MAX_FILES];
	struct tsq_range refused_pin[TSQ_MAX_MEMORIES];
	/* argument and contents of blocks follow */
};

/* Reply FETCH. Nothing has changed. */
struct tsq_fetch {
	struct tsq_reply reply;
	__le32 blocks;
	__le32 files;
	__le32 pins;
	__le32 allocations;
	struct tsq_range block[TSQ_MAX_BLOCKS];		/* send these as blocks */
	__s32 file[TSQ_MAX_FILES];			/* send the files of these descriptors */
	struct tsq_range pin[TSQ_MAX_MEMORIES];		/* pin these, page-aligned */
	__le64 allocate[TSQ_MAX_MEMORIES];		/* allocate and zero so many bytes, page-aligned */
};
/* If memory cannot be allocated, the ioctl fails with ENOMEM in the guest; nothing has changed. */

/* Memory to show to the program in place of what is there: a range of a mapping of nvidia-uvm. */
struct tsq_place {
	__le64 address;			/* of the program, page-aligned */
	__le64 length;
	__le64 memory;			/* id of the memory */
	__le64 offset;			/* into the memory */
};

/* Reply DONE. */
struct tsq_done {
	struct tsq_reply reply;		/* errno of the ioctl */
	__le32 argument_bytes;		/* as long as the request's: write it back, also with an errno */
	__le32 argument_offset;
	__le32 writes;			/* blocks to write to the program's memory, before the argument */
	__le32 places;			/* to be done first */
	struct tsq_block write[TSQ_MAX_BLOCKS];
	struct tsq_place place[TSQ_MAX_MEMORIES];
	/* argument and contents of writes follow */
};

/* -- MAP: mmap() of a file. */
struct tsq_map {
	struct tsq_request request;
	__le64 length;			/* page-aligned */
	__le64 offset;			/* in bytes */
	__le32 flags;			/* TSQ_MAP_WRITABLE */
	__le32 reserved;
};

#define TSQ_MAP_WRITABLE	(1u << 0)

struct tsq_mapped {
	struct tsq_reply reply;
	__le32 kind;			/* TSQ_MAPPED_* */
	__le32 reserved;
	__le64 memory;			/* MEMORY: its id */
	__le64 offset;			/* MEMORY: into the memory */
};

#define TSQ_MAPPED_EMPTY	0	/* nothing yet: a tsq_place may come. Accesses are SIGBUS */
#define TSQ_MAPPED_DOORBELL	1	/* BAR 1 from its start */
#define TSQ_MAPPED_MEMORY	2	/* pages of a memory */

/*
 * -- WITHDRAWN: the doorbell page was removed from all programs, as TSQ_COMPLETION_WITHDRAW asked.
 *
 * After that the device may sleep. At the next access of a program to the page, write to WAKE, then
 * map it again. A guest need not withdraw the page: the device then goes on looking at it.
 */
struct tsq_withdrawn {
	struct tsq_request request;
	__le64 generation;		/* from the completion */
};

#endif
