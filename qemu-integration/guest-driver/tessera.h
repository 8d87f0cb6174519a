/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tessera's guest driver: shared definitions.
 *
 * The driver is a transport between programs that use NVIDIA's device files and a vGPU, which
 * implements them. See docs/guest.md.
 *
 * main.c	module, PCI function, suspend and reset
 * session.c	start and stop of the device's queue; welcome.c what the device says of itself
 * queue.c	requests and completions
 * request.c	buffers of requests
 * nodes.c	device nodes
 * file.c	open files
 * ioctl.c	ioctls; fetch.c what the device asks for, done.c what it answers
 * memory.c	pages for the device: allocated, or pinned; dma.c their addresses
 * mapping.c	mmap; place.c ranges of nvidia-uvm; doorbell.c the doorbell page
 * proc.c	/proc/driver/nvidia
 * direct.c	/dev/tessera-vgpu; checkpoint.c /dev/tessera-checkpoint
 *
 * Lifetimes
 *
 * A program can let accesses to its memory wait for as long as it likes (userfaultfd, FUSE). The
 * vGPU can go at any time: by unbinding, unplugging, reset, suspend, or a failure that ends its
 * session. Hence three rules:
 *
 * 1. No lock of the driver is held while a program's memory is accessed.
 * 2. What is used after a sleep is kept by a reference. Whether its session still lasts is checked
 *    again under the lock that the use needs.
 * 3. The end of a session waits for no program. It takes from each object what the device may use,
 *    and leaves the object to the holders of its references.
 *
 * Each object: who holds it; what protects it; what the end of its session does.
 *
 * tsr_dev: the PCI function, open files, requests; kref. Outlives all other objects: mappings and
 *	places hold a file, calls a request. After its removal it has no registers: what uses them
 *	checks dev->present under dev->lock, or queue.running under queue.lock or doorbell_lock.
 * session, a number: changed under dev->lock and queue.lock while the queue does not run. Its end
 *	clears queue.running, after which tsr_session_is() and tsr_submit() refuse it for ever.
 * tsr_file: its struct file, which mappings and fget() hold; does not change after open(), except
 *	for the places (places_lock). Stays: ioctl(), mmap() and poll() report the end.
 * tsr_request: its sender, or the queue's slot once the sender was killed (queue.lock). Leaves its
 *	slot with -EIO.
 * tsr_buffer: its request, whose sender alone uses it unless it is pending, or dev->idle
 *	(idle_lock). Loses its addresses; idle ones are freed.
 * tsr_memory: the table dev->memories, calls, places and mappings; kref. Does not change once it is
 *	in the table. Leaves the table and loses its addresses; faults are SIGBUS from then on. What
 *	removes it from the table owns the table's reference, which is used by no other code.
 * tsr_dma: a part of its buffer or memory. The ranges do not change until the owner frees them;
 *	whether the device may use them is under dma_lock. The end of the session unmaps them and
 *	leaves the numbers, which the owner may be reading.
 * tsr_place: its file (places_lock). Stays until the file is closed or the range is unmapped.
 * tsr_calls: tsr_dev; RCU. Replaced by the next session.
 * files in /proc: tsr_dev (dev->lock), their content under tsr_proc_lock. Stay; the next session
 *	replaces the content. Only the removal of the driver waits for their readers.
 * doorbell page: mapped by faults under doorbell_lock, while the session lasts. The end of the
 *	session takes that lock and unmaps the page after it.
 *
 * A buffer or memory gets addresses, and a memory its place in the table, under dma_lock and only
 * while its session lasts. So nothing is added after tsr_session_stop() has emptied both.
 *
 * A mapping that is made, or a fault that is served, during the end of a session may keep its pages
 * of memory. They have references, and the device does not use them any more.
 *
 * The module stays while a file is open. Works, the thread and the interrupt end with tsr_end().
 *
 * Locks, outermost first: checkpoint.opening, dev->lock, mmap_lock (of the kernel), doorbell_lock
 * or places_lock, dma_lock, queue.lock, files_lock or that of the table. tsr_current_lock,
 * tsr_proc_lock and idle_lock are innermost. dev->lock may be held for 20 s, in which a device
 * starts or stops.
 *
 * Memory that the driver allocates for a program counts for the program's memory cgroup. At most 64
 * requests are at the device, those of killed processes included. Other senders wait, and can be
 * killed.
 */
#ifndef TESSERA_H
#define TESSERA_H

#include <linux/cdev.h>
#include <linux/completion.h>
#include <linux/fs.h>
#include <linux/hashtable.h>
#include <linux/kref.h>
#include <linux/llist.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "tessera_queue.h"

#define TSR_NAME "tessera_guest"

/* Entries of the ring, and maximum number of requests at a time. */
#define TSR_SLOTS 64
/* Maximum number of GPU nodes. */
#define TSR_MAX_MINORS 16
/* Maximum length of an ioctl's argument. */
#define TSR_MAX_ARGUMENT (64 << 10)
/* Offset at which the doorbell page is in the address space of all files. */
#define TSR_DOORBELL_OFFSET BIT_ULL(52)
/* End of the offsets that programs may pass for nvidia-uvm. */
#define TSR_MAX_OFFSET BIT_ULL(51)

/* BARs of the vGPU. */
#define TSR_BAR_DOORBELL 1
#define TSR_BAR_CONTROL 3

struct tsr_dev;
struct tsr_file;

struct tsr_dma_range {
	dma_addr_t address;
	size_t length;
};

/*
 * Addresses of pages for the device. Removed when the device stops, at the latest. The numbers do
 * not change until the owner frees them, and need no lock.
 */
struct tsr_dma {
	struct list_head link;		/* in tsr_dev.dma, if mapped; under dma_lock */
	bool mapped;			/* the device may use them; under dma_lock */
	struct tsr_dma_range *range;
	u32 count;
};

/* Buffer of requests: its pages, and behind them the page with their addresses. */
struct tsr_buffer {
	void *data;
	u32 pages;			/* without the page with the addresses */
	u32 session;			/* the session that the addresses are of */
	__le64 *list;
	dma_addr_t list_address;
	struct tsr_dma dma;
	struct list_head link;		/* in tsr_dev.idle */
};

/* A request. Freed by its sender, or once it is complete if its sender was killed. */
struct tsr_request {
	struct tsr_dev *dev;
	struct tsr_buffer *buffer;
	struct completion done;
	u64 cookie;
	u32 bytes;			/* of the request, then of the reply */
	int error;			/* the request got no reply */
	bool pending;			/* the device has the buffer */
	bool abandoned;			/* the sender was killed */
	/* Called for an abandoned request when it is complete. Frees the request. */
	void (*orphan)(struct tsr_request *request);
	void *context;
	struct work_struct work;
};

/* The queue. */
struct tsr_queue {
	spinlock_t lock;		/* of all fields */
	bool running;
	struct tsq_indices *indices;
	struct tsq_submission *submissions;
	struct tsq_completion *completions;
	dma_addr_t base;
	u32 tail;			/* of submissions */
	u32 head;			/* of completions */
	u32 sequence;
	u32 in_flight;
	struct tsr_request *slot[TSR_SLOTS];
	wait_queue_head_t room;
};

/* Pages that the device uses, or has used and programs have mapped. */
struct tsr_memory {
	struct kref ref;
	u32 id;
	u32 session;			/* the session that it is of */
	bool pinned;
	u64 address;			/* of the program, if pinned */
	unsigned long pages;
	unsigned long charged;
	struct page **page;
	struct tsr_dma dma;
	struct tsq_list **list;		/* pages with the ranges, for one request */
	u32 lists;
	struct tsr_dma list_dma;
	struct tsr_dev *dev;		/* outlives it: see above */
	struct llist_node returned;
};

/* An open file. */
struct tsr_file {
	struct tsr_dev *dev;
	struct hlist_node link;		/* in tsr_dev.files */
	u64 id;
	u32 session;
	bool uvm;
	bool event;
	wait_queue_head_t wait;
	struct tsr_request *close;	/* so that closing needs no memory */
	struct mutex places_lock;	/* of places */
	struct list_head places;
};

/* Where arguments have pointers and descriptors. */
struct tsr_calls {
	struct rcu_head rcu;
	u32 count;
	struct tsq_call call[];
};

struct tsr_proc {
	struct proc_dir_entry *root;
	struct list_head files;
	struct list_head folders;
};

enum tsr_direct_state {
	TSR_DIRECT_CLOSED,
	TSR_DIRECT_OPEN,		/* the program has the vGPU */
	TSR_DIRECT_LOST,		/* the vGPU was taken from the program */
};

/* A program that drives the vGPU itself. */
struct tsr_direct {
	enum tsr_direct_state state;	/* changed under tsr_dev.lock */
	atomic64_t events;		/* interrupts that the program has not read */
	wait_queue_head_t wait;
};

/* Requests of the host to checkpoint the programs. */
struct tsr_checkpoint {
	bool open;			/* an agent has the node; under tsr_dev.lock */
	bool done;			/* no session, and open() waits; changed under opening */
	bool signalled;			/* the request may have changed */
	u32 last;			/* request that the agent has read */
	struct rw_semaphore opening;	/* read: a file is being opened. Before tsr_dev.lock */
	wait_queue_head_t wait;
};

/* A vGPU. */
struct tsr_dev {
	struct kref ref;
	struct pci_dev *pdev;
	void __iomem *regs;
	phys_addr_t doorbell;
	size_t doorbell_len;
	bool irq;

	struct mutex lock;		/* of start and stop */
	bool present;
	bool invalid;			/* the device has broken the queue's rules */
	bool leak;			/* the device may still use memory: never free it */
	u32 session;			/* counts starts; files of other sessions are dead */
	struct tsr_direct direct;
	struct tsr_checkpoint checkpoint;
	struct tsr_queue queue;
	struct task_struct *poller;
	wait_queue_head_t kick;
	struct workqueue_struct *work;
	struct work_struct failed;
	unsigned long checked;		/* time of the last look at the state */

	spinlock_t files_lock;		/* of files; also from interrupts */
	DECLARE_HASHTABLE(files, 8);

	struct xarray memories;
	u32 next_memory;
	struct llist_head returned;
	struct work_struct return_work;

	struct mutex dma_lock;		/* of dma_ok, dma, and additions to memories */
	bool dma_ok;
	struct list_head dma;		/* all tsr_dma */

	spinlock_t idle_lock;		/* of idle, idle_count */
	struct list_head idle;		/* buffers for ioctls */
	u32 idle_count;

	struct mutex doorbell_lock;	/* of withdrawn */
	bool withdrawn;
	u64 generation;
	struct work_struct withdraw;

	struct vfsmount *mount;
	struct inode *inode;		/* address space of all files, to unmap them */

	struct tsr_calls __rcu *calls;
	u32 minors;
	u32 minor[TSR_MAX_MINORS];
	struct tsr_proc proc;
	bool nodes;
};

/* main.c */
struct tsr_dev *tsr_dev_get(void);
void tsr_dev_put(struct tsr_dev *dev);

/* session.c */
int tsr_session_start(struct tsr_dev *dev);
void tsr_session_stop(struct tsr_dev *dev);
int tsr_session_ensure(struct tsr_dev *dev);
void tsr_session_failed(struct work_struct *work);
static inline bool tsr_session_is(struct tsr_dev *dev, u32 session)
{
	/* In this order: the number changes while the queue does not run. */
	return smp_load_acquire(&dev->queue.running) && READ_ONCE(dev->session) == session;
}

/* welcome.c */
int tsr_welcome(struct tsr_dev *dev, const void *reply, u32 bytes);

/* queue.c */
int tsr_queue_alloc(struct tsr_dev *dev);
void tsr_queue_free(struct tsr_dev *dev);
int tsr_queue_start_polling(struct tsr_dev *dev);
void tsr_queue_stop_polling(struct tsr_dev *dev);
bool tsr_queue_drain(struct tsr_dev *dev);
void tsr_queue_fail_all(struct tsr_dev *dev);
int tsr_submit(struct tsr_request *request, bool killable);
int tsr_wait(struct tsr_request *request);
/* Result of tsr_wait(): the request is no longer the caller's. */
#define TSR_ABANDONED 1
int tsr_call(struct tsr_request *request);

/* request.c */
struct tsr_request *tsr_request_new(struct tsr_dev *dev, u32 session, u32 pages);
void tsr_request_free(struct tsr_request *request);
void *tsr_request_begin(struct tsr_request *request, u32 opcode, u64 file, u32 bytes);
void tsr_buffers_free(struct tsr_dev *dev);

/* nodes.c */
int tsr_nodes_init(void);
void tsr_nodes_exit(void);
int tsr_nodes_add(struct tsr_dev *dev);
void tsr_nodes_remove(struct tsr_dev *dev);
int tsr_node_of(struct inode *inode, u32 *node, u32 *minor);

/* file.c */
extern const struct file_operations tsr_file_ops;
void tsr_file_event(struct tsr_dev *dev, u64 id);
void tsr_files_wake(struct tsr_dev *dev);
bool tsr_files_any(struct tsr_dev *dev);

/* ioctl.c, fetch.c, done.c */
struct tsr_ioctl {
	struct tsr_file *file;
	struct tsr_request *request;
	u32 number;
	u64 argument;
	u32 argument_bytes;
	u32 room;			/* rest of the buffer, in bytes */
	u32 blocks;
	u32 files;
	u32 memories;
	u32 refused_files;
	u32 refused_pins;
	struct tsq_range block[TSQ_MAX_BLOCKS];
	struct tsq_file fd[TSQ_MAX_FILES];
	struct tsr_memory *memory[TSQ_MAX_MEMORIES];
	__s32 refused_file[TSQ_MAX_FILES];
	struct tsq_range refused_pin[TSQ_MAX_MEMORIES];
	struct tsq_fetch fetch;
};

long tsr_file_ioctl(struct file *filp, unsigned int number, unsigned long argument);
void tsr_ioctl_drop(struct tsr_ioctl *call);
int tsr_fetch(struct tsr_ioctl *call);
int tsr_add_block(struct tsr_ioctl *call, u64 address, u64 length);
int tsr_add_file(struct tsr_ioctl *call, s32 fd);
int tsr_done(struct tsr_ioctl *call);

/* dma.c */
int tsr_dma_map(struct tsr_dev *dev, u32 session, struct tsr_dma *dma, struct page **page,
		unsigned long pages);
void tsr_dma_unmap(struct tsr_dev *dev, struct tsr_dma *dma);
void tsr_dma_free(struct tsr_dev *dev, struct tsr_dma *dma);
bool tsr_dma_allowed(struct tsr_dev *dev, u32 session);
void tsr_dma_allow(struct tsr_dev *dev, bool ok);
void tsr_dma_end(struct tsr_dev *dev);

/* memory.c */
struct tsr_memory *tsr_memory_allocate(struct tsr_dev *dev, u32 session, u64 length);
struct tsr_memory *tsr_memory_pin(struct tsr_dev *dev, u32 session, u64 address, u64 length);
struct tsr_memory *tsr_memory_get(struct tsr_dev *dev, u32 session, u64 id);
void tsr_memory_put(struct tsr_memory *memory);
void tsr_memory_take_back(struct tsr_memory *memory);
void tsr_memory_returned(struct tsr_dev *dev, u64 id);
void tsr_memory_return_work(struct work_struct *work);
void tsr_memory_return_all(struct tsr_dev *dev);
void tsr_memory_free_list(struct tsr_memory *memory);
struct page *tsr_memory_page(struct tsr_memory *memory, unsigned long index);

/* mapping.c, place.c, doorbell.c */
int tsr_file_mmap(struct file *filp, struct vm_area_struct *vma);
void tsr_unmap_all(struct tsr_dev *dev);
extern const struct vm_operations_struct tsr_range_vm_ops;
int tsr_place(struct tsr_file *from, const struct tsq_place *place);
void tsr_places_drop(struct tsr_file *file, u64 offset, u64 length);
extern const struct vm_operations_struct tsr_doorbell_vm_ops;
void tsr_doorbell_withdraw(struct work_struct *work);

/* direct.c */
extern const struct file_operations tsr_direct_ops;
bool tsr_direct_event(struct tsr_dev *dev);
void tsr_direct_end(struct tsr_dev *dev);

/* checkpoint.c */
extern const struct file_operations tsr_checkpoint_ops;
void tsr_checkpoint_init(struct tsr_checkpoint *checkpoint);
void tsr_checkpoint_wake(struct tsr_dev *dev);
void tsr_checkpoint_end(struct tsr_dev *dev);
int tsr_checkpoint_begin_open(struct tsr_dev *dev);
void tsr_checkpoint_end_open(struct tsr_dev *dev);

/* proc.c */
int tsr_proc_begin(struct tsr_proc *proc);
int tsr_proc_set(struct tsr_proc *proc, const char *path, const void *content, size_t len);
void tsr_proc_end(struct tsr_proc *proc);

#endif
