// SPDX-License-Identifier: GPL-2.0
/*
 * Files in /proc/driver/nvidia, with the content that the device gives.
 *
 * The content is that of the time when the device was found. Files that are open while the device
 * goes away keep their content.
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
	size_t len;
	char content[];
};

static int tsr_proc_show(struct seq_file *seq, void *unused)
{
	const struct tsr_proc_file *file = pde_data(file_inode(seq->file));

	return seq_write(seq, file->content, file->len);
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

/* Makes the root folder. Fails if another driver has it. */
int tsr_proc_begin(struct tsr_proc *proc)
{
	INIT_LIST_HEAD(&proc->files);
	INIT_LIST_HEAD(&proc->folders);
	proc->root = proc_mkdir(TSR_PROC_ROOT, NULL);
	return proc->root ? 0 : -EEXIST;
}

/* Adds a file. */
int tsr_proc_add(struct tsr_proc *proc, const char *path, const void *content, size_t len)
{
	struct proc_dir_entry *folder;
	struct tsr_proc_file *file;
	const char *slash = strrchr(path, '/');

	if (!tsr_proc_path_ok(path))
		return -EPROTO;
	folder = tsr_proc_folder(proc, path, slash ? slash - path : 0);
	file = kvmalloc(struct_size(file, content, len), GFP_KERNEL);
	if (!folder || !file)
		goto no_memory;
	file->len = len;
	memcpy(file->content, content, len);
	if (!proc_create_single_data(slash ? slash + 1 : path, 0444, folder, tsr_proc_show, file))
		goto no_memory;
	list_add(&file->link, &proc->files);
	return 0;

no_memory:
	kvfree(file);
	return -ENOMEM;
}

/* Removes all files. Waits for readers. */
void tsr_proc_end(struct tsr_proc *proc)
{
	struct tsr_proc_folder *folder, *next_folder;
	struct tsr_proc_file *file, *next_file;

	if (!proc->root)
		return;
	proc_remove(proc->root);
	proc->root = NULL;
	list_for_each_entry_safe(file, next_file, &proc->files, link)
		kvfree(file);
	list_for_each_entry_safe(folder, next_folder, &proc->folders, link)
		kfree(folder);
	INIT_LIST_HEAD(&proc->files);
	INIT_LIST_HEAD(&proc->folders);
}
