// SPDX-License-Identifier: GPL-2.0
/*
 * Files in /proc/driver/nvidia, with the content that the device gives.
 *
 * The content is that of the current session's start, or of the last one's. Each start replaces the
 * content, and does not remove files: procfs would wait for a reader, and a program can read into
 * memory whose faults it serves itself. Only the end of the device waits for readers.
 */
#include <linux/ctype.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#include "tessera.h"

#define TSR_PROC_ROOT "driver/nvidia"
#define TSR_PROC_DEPTH 8

/* A file. Lives as long as the folder that has it. */
struct tsr_proc_file {
	struct list_head link;
	size_t len;			/* with content, under tsr_proc_lock */
	void *content;
	char path[];
};

/* Not held while a program's memory is written: seq_file has a buffer of its own. */
static DEFINE_MUTEX(tsr_proc_lock);

static int tsr_proc_show(struct seq_file *seq, void *unused)
{
	const struct tsr_proc_file *file = pde_data(file_inode(seq->file));
	int error;

	mutex_lock(&tsr_proc_lock);
	error = seq_write(seq, file->content, file->len);
	mutex_unlock(&tsr_proc_lock);
	return error;
}

/* Whether a path has only plain names, so that it stays below the folder. */
static bool tsr_proc_path_ok(const char *path)
{
	const char *name = path;
	int depth = 0;

	for (;; path++) {
		if (*path && *path != '/') {
			if (!isalnum(*path) && !strchr(".:-_", *path))
				return false;
			continue;
		}
		if (path == name || name[0] == '.' || ++depth > TSR_PROC_DEPTH)
			return false;
		if (!*path)
			return true;
		name = path + 1;
	}
}

/* A folder below the root, by its path. They are removed with the root. */
struct tsr_proc_folder {
	struct list_head link;
	struct proc_dir_entry *entry;
	char path[];
};

static struct proc_dir_entry *tsr_proc_folder(struct tsr_proc *proc, const char *path, size_t len)
{
	struct tsr_proc_folder *folder;
	struct proc_dir_entry *parent = proc->root;
	const char *slash;
	size_t before = 0;

	if (!len)
		return proc->root;
	list_for_each_entry(folder, &proc->folders, link)
		if (strlen(folder->path) == len && !memcmp(folder->path, path, len))
			return folder->entry;
	for (slash = path; slash < path + len; slash++)
		if (*slash == '/')
			before = slash - path;
	if (before)
		parent = tsr_proc_folder(proc, path, before);
	if (!parent)
		return NULL;
	folder = kzalloc(struct_size(folder, path, len + 1), GFP_KERNEL);
	if (!folder)
		return NULL;
	memcpy(folder->path, path, len);
	folder->entry = proc_mkdir(folder->path + (before ? before + 1 : 0), parent);
	if (!folder->entry) {
		kfree(folder);
		return NULL;
	}
	list_add(&folder->link, &proc->folders);
	return folder->entry;
}

/* Makes the root folder, unless it is there. Fails if another driver has it. */
int tsr_proc_begin(struct tsr_proc *proc)
{
	if (proc->root)
		return 0;
	INIT_LIST_HEAD(&proc->files);
	INIT_LIST_HEAD(&proc->folders);
	proc->root = proc_mkdir(TSR_PROC_ROOT, NULL);
	return proc->root ? 0 : -EEXIST;
}

static struct tsr_proc_file *tsr_proc_find(struct tsr_proc *proc, const char *path)
{
	struct tsr_proc_file *file;

	list_for_each_entry(file, &proc->files, link)
		if (!strcmp(file->path, path))
			return file;
	return NULL;
}

/* Makes a file without content. */
static struct tsr_proc_file *tsr_proc_make(struct tsr_proc *proc, const char *path)
{
	const char *slash = strrchr(path, '/');
	struct proc_dir_entry *folder;
	struct tsr_proc_file *file;

	folder = tsr_proc_folder(proc, path, slash ? slash - path : 0);
	file = kzalloc(struct_size(file, path, strlen(path) + 1), GFP_KERNEL);
	if (!folder || !file)
		goto no_memory;
	strcpy(file->path, path);
	if (!proc_create_single_data(slash ? slash + 1 : path, 0444, folder, tsr_proc_show, file))
		goto no_memory;
	list_add(&file->link, &proc->files);
	return file;

no_memory:
	kfree(file);
	return NULL;
}

/* Gives a file its content, and makes it if there is none. */
int tsr_proc_set(struct tsr_proc *proc, const char *path, const void *content, size_t len)
{
	struct tsr_proc_file *file;
	void *copy;

	if (!tsr_proc_path_ok(path))
		return -EPROTO;
	copy = kvmalloc(len ?: 1, GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	memcpy(copy, content, len);
	file = tsr_proc_find(proc, path) ?: tsr_proc_make(proc, path);
	if (!file) {
		kvfree(copy);
		return -ENOMEM;
	}
	mutex_lock(&tsr_proc_lock);
	swap(file->content, copy);
	file->len = len;
	mutex_unlock(&tsr_proc_lock);
	kvfree(copy);
	return 0;
}

/* Removes all files. Waits for readers: not with a lock that programs need. */
void tsr_proc_end(struct tsr_proc *proc)
{
	struct tsr_proc_folder *folder, *next_folder;
	struct tsr_proc_file *file, *next_file;

	if (!proc->root)
		return;
	proc_remove(proc->root);
	proc->root = NULL;
	list_for_each_entry_safe(file, next_file, &proc->files, link) {
		kvfree(file->content);
		kfree(file);
	}
	list_for_each_entry_safe(folder, next_folder, &proc->folders, link)
		kfree(folder);
	INIT_LIST_HEAD(&proc->files);
	INIT_LIST_HEAD(&proc->folders);
}
