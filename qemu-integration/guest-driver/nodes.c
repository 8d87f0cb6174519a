// SPDX-License-Identifier: GPL-2.0
/*
 * Device nodes: /dev/nvidiactl, /dev/nvidiaN, /dev/nvidia-uvm, /dev/tessera-vgpu,
 * /dev/tessera-checkpoint.
 */
#include <linux/module.h>

#include "compat.h"
#include "tessera.h"

#define TSR_MAJOR 195
#define TSR_CONTROL MKDEV(TSR_MAJOR, 255)

/* Mode of the nodes, as with NVIDIA's driver. */
static uint mode = 0666;
module_param(mode, uint, 0444);
MODULE_PARM_DESC(mode, "Mode of NVIDIA's device nodes (0666: all users may use the vGPU)");

/* As NVIDIA's libraries look for them in /proc/devices. */
static struct {
	struct cdev cdev;
	dev_t first;
	unsigned int count;
	const char *name;
	const struct file_operations *ops;
} tsr_region[] = {
	{ .first = MKDEV(TSR_MAJOR, 0), .count = 255, .name = "nvidia", .ops = &tsr_file_ops },
	{ .first = TSR_CONTROL, .count = 1, .name = "nvidiactl", .ops = &tsr_file_ops },
	{ .first = 0, .count = 1, .name = "nvidia-uvm", .ops = &tsr_file_ops },
	{ .first = 0, .count = 1, .name = "tessera-vgpu", .ops = &tsr_direct_ops },
	{ .first = 0, .count = 1, .name = "tessera-checkpoint", .ops = &tsr_checkpoint_ops },
};

#define TSR_UVM (tsr_region[2].first)
#define TSR_DIRECT (tsr_region[3].first)
#define TSR_CHECKPOINT (tsr_region[4].first)

static struct class *tsr_class;

static char *tsr_devnode(TSR_DEVNODE_CONST struct device *dev, umode_t *node_mode)
{
	bool of_root = dev->devt == TSR_DIRECT || dev->devt == TSR_CHECKPOINT;

	if (node_mode)
		*node_mode = of_root ? 0600 : mode & 0666;
	return NULL;
}

/* Returns which node an inode is. */
int tsr_node_of(struct inode *inode, u32 *node, u32 *minor)
{
	*minor = 0;
	if (inode->i_rdev == TSR_UVM) {
		*node = TSQ_NODE_UVM;
	} else if (inode->i_rdev == TSR_CONTROL) {
		*node = TSQ_NODE_CONTROL;
	} else {
		*node = TSQ_NODE_GPU;
		*minor = iminor(inode);
	}
	return 0;
}

static int tsr_node_add(struct tsr_dev *dev, dev_t number, const char *name, u32 minor)
{
	return PTR_ERR_OR_ZERO(device_create(tsr_class, &dev->pdev->dev, number, NULL, name,
					     minor));
}

/* Makes the nodes of a device. */
int tsr_nodes_add(struct tsr_dev *dev)
{
	int error;
	u32 at;

	dev->nodes = true;
	error = tsr_node_add(dev, TSR_CONTROL, "nvidiactl", 0);
	if (!error)
		error = tsr_node_add(dev, TSR_UVM, "nvidia-uvm", 0);
	if (!error)
		error = tsr_node_add(dev, TSR_DIRECT, "tessera-vgpu", 0);
	if (!error)
		error = tsr_node_add(dev, TSR_CHECKPOINT, "tessera-checkpoint", 0);
	for (at = 0; at < dev->minors && !error; at++)
		error = tsr_node_add(dev, MKDEV(TSR_MAJOR, dev->minor[at]), "nvidia%u",
				     dev->minor[at]);
	if (error)
		tsr_nodes_remove(dev);
	return error;
}

/* Removes the nodes of a device. */
void tsr_nodes_remove(struct tsr_dev *dev)
{
	u32 at;

	if (!dev->nodes)
		return;
	for (at = 0; at < dev->minors; at++)
		device_destroy(tsr_class, MKDEV(TSR_MAJOR, dev->minor[at]));
	device_destroy(tsr_class, TSR_CHECKPOINT);
	device_destroy(tsr_class, TSR_DIRECT);
	device_destroy(tsr_class, TSR_UVM);
	device_destroy(tsr_class, TSR_CONTROL);
	dev->nodes = false;
}

static int tsr_region_add(unsigned int at)
{
	int error;

	if (tsr_region[at].first)
		error = register_chrdev_region(tsr_region[at].first, tsr_region[at].count,
					       tsr_region[at].name);
	else
		error = alloc_chrdev_region(&tsr_region[at].first, 0, tsr_region[at].count,
					    tsr_region[at].name);
	if (error)
		return error;
	cdev_init(&tsr_region[at].cdev, tsr_region[at].ops);
	tsr_region[at].cdev.owner = THIS_MODULE;
	error = cdev_add(&tsr_region[at].cdev, tsr_region[at].first, tsr_region[at].count);
	if (error)
		unregister_chrdev_region(tsr_region[at].first, tsr_region[at].count);
	return error;
}

static void tsr_region_remove(unsigned int at)
{
	cdev_del(&tsr_region[at].cdev);
	unregister_chrdev_region(tsr_region[at].first, tsr_region[at].count);
}

/* Takes the numbers of the nodes. */
int tsr_nodes_init(void)
{
	unsigned int at;
	int error = 0;

	tsr_class = tsr_class_create(TSR_NAME);
	if (IS_ERR(tsr_class))
		return PTR_ERR(tsr_class);
	tsr_class->devnode = tsr_devnode;
	for (at = 0; at < ARRAY_SIZE(tsr_region); at++) {
		error = tsr_region_add(at);
		if (error)
			break;
	}
	if (!error)
		return 0;
	pr_err(TSR_NAME ": The numbers of NVIDIA's device nodes are taken: unload its driver\n");
	while (at--)
		tsr_region_remove(at);
	class_destroy(tsr_class);
	return error;
}

/* Gives the numbers back. */
void tsr_nodes_exit(void)
{
	unsigned int at;

	for (at = 0; at < ARRAY_SIZE(tsr_region); at++)
		tsr_region_remove(at);
	class_destroy(tsr_class);
}
