// SPDX-License-Identifier: GPL-2.0
/*
 * Tessera's guest driver: NVIDIA's device files in a VM, implemented by a vGPU.
 *
 * The module, the PCI function, suspend and reset.
 */
#include <linux/dma-mapping.h>
#include <linux/interrupt.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/pci.h>
#include <linux/pseudo_fs.h>
#include <linux/slab.h>

#include "tessera.h"

#define TSR_BARS (BIT(TSR_BAR_DOORBELL) | BIT(TSR_BAR_CONTROL))
#define TSR_FS_MAGIC 0x54535241

static bool msi = true;
module_param(msi, bool, 0444);
MODULE_PARM_DESC(msi, "Use interrupts (1); without, a thread looks at the queue");

/*
 * The vGPU. A VM has one: NVIDIA's files do not tell which GPU a request is for. The lock is held for
 * the pointer alone, never while the device starts or stops: opening a file takes it.
 */
static struct tsr_dev *tsr_current;
static DEFINE_MUTEX(tsr_current_lock);

static int tsr_mounts;
static struct vfsmount *tsr_mount;

static int tsr_fs_context(struct fs_context *context)
{
	return init_pseudo(context, TSR_FS_MAGIC) ? 0 : -ENOMEM;
}

/*
 * File system with the inodes whose address spaces the files have. Without an owner, as its mount
 * would keep the module. Devices release it, and open files keep both.
 */
static struct file_system_type tsr_fs = {
	.name = TSR_NAME,
	.init_fs_context = tsr_fs_context,
	.kill_sb = kill_anon_super,
};

/* Returns the vGPU with a reference, or NULL. */
struct tsr_dev *tsr_dev_get(void)
{
	struct tsr_dev *dev;

	mutex_lock(&tsr_current_lock);
	dev = tsr_current;
	if (dev)
		kref_get(&dev->ref);
	mutex_unlock(&tsr_current_lock);
	return dev;
}

static void tsr_dev_free(struct kref *ref)
{
	struct tsr_dev *dev = container_of(ref, struct tsr_dev, ref);

	if (dev->inode) {
		iput(dev->inode);
		simple_release_fs(&tsr_mount, &tsr_mounts);
	}
	kfree(rcu_dereference_protected(dev->calls, true));
	xa_destroy(&dev->memories);
	pci_dev_put(dev->pdev);
	kfree(dev);
}

void tsr_dev_put(struct tsr_dev *dev)
{
	kref_put(&dev->ref, tsr_dev_free);
}

static irqreturn_t tsr_irq(int irq, void *data)
{
	struct tsr_dev *dev = data;

	if (tsr_direct_event(dev) || tsr_queue_drain(dev))
		return IRQ_HANDLED;
	tsr_checkpoint_wake(dev);
	/* Another state, or completions that were taken before. */
	if (time_after(jiffies, dev->checked + HZ / 10)) {
		dev->checked = jiffies;
		queue_work(dev->work, &dev->failed);
	}
	return IRQ_HANDLED;
}

static int tsr_dev_inode(struct tsr_dev *dev)
{
	int error = simple_pin_fs(&tsr_fs, &tsr_mount, &tsr_mounts);
	struct inode *inode;

	if (error)
		return error;
	inode = alloc_anon_inode(tsr_mount->mnt_sb);
	if (IS_ERR(inode)) {
		simple_release_fs(&tsr_mount, &tsr_mounts);
		return PTR_ERR(inode);
	}
	dev->inode = inode;
	return 0;
}

static struct tsr_dev *tsr_dev_new(struct pci_dev *pdev)
{
	struct tsr_dev *dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	int error;

	if (!dev)
		return ERR_PTR(-ENOMEM);
	kref_init(&dev->ref);
	dev->pdev = pci_dev_get(pdev);
	mutex_init(&dev->lock);
	spin_lock_init(&dev->queue.lock);
	init_waitqueue_head(&dev->queue.room);
	init_waitqueue_head(&dev->kick);
	init_waitqueue_head(&dev->direct.wait);
	tsr_checkpoint_init(&dev->checkpoint);
	INIT_WORK(&dev->failed, tsr_session_failed);
	dev->checked = jiffies;
	spin_lock_init(&dev->files_lock);
	hash_init(dev->files);
	xa_init_flags(&dev->memories, XA_FLAGS_ALLOC1 | XA_FLAGS_LOCK_IRQ | XA_FLAGS_ACCOUNT);
	init_llist_head(&dev->returned);
	INIT_WORK(&dev->return_work, tsr_memory_return_work);
	mutex_init(&dev->dma_lock);
	INIT_LIST_HEAD(&dev->dma);
	spin_lock_init(&dev->idle_lock);
	INIT_LIST_HEAD(&dev->idle);
	mutex_init(&dev->doorbell_lock);
	INIT_WORK(&dev->withdraw, tsr_doorbell_withdraw);
	error = tsr_dev_inode(dev);
	if (error) {
		tsr_dev_put(dev);
		return ERR_PTR(error);
	}
	return dev;
}

/* Checks that the function is a vGPU with a queue. */
static int tsr_check(struct tsr_dev *dev)
{
	struct device *parent = &dev->pdev->dev;

	if (readl(dev->regs + TSQ_REG_MAGIC) != TSQ_MAGIC)
		return -ENODEV;
	if (readl(dev->regs + TSQ_REG_VERSION) >> 16 != 1 ||
	    !(readl(dev->regs + TSQ_REG_FEATURES) & TSQ_FEATURE_QUEUE)) {
		dev_info(parent, "The vGPU has no files for CUDA: use a type of series C\n");
		return -ENODEV;
	}
	if (readl(dev->regs + TSQ_REG_QUEUE_VERSION) >> 16 != TSQ_VERSION >> 16) {
		dev_err(parent, "The vGPU has another version of the queue: update this driver\n");
		return -ENODEV;
	}
	return 0;
}

static int tsr_interrupts(struct tsr_dev *dev)
{
	struct pci_dev *pdev = dev->pdev;
	int error;

	if (!msi || pci_alloc_irq_vectors(pdev, 1, 1, PCI_IRQ_MSI) < 0)
		return 0;
	error = request_irq(pci_irq_vector(pdev, 0), tsr_irq, 0, TSR_NAME, dev);
	if (error)
		pci_free_irq_vectors(pdev);
	dev->irq = !error;
	return 0;
}

static void tsr_no_interrupts(struct tsr_dev *dev)
{
	if (!dev->irq)
		return;
	free_irq(pci_irq_vector(dev->pdev, 0), dev);
	pci_free_irq_vectors(dev->pdev);
	WRITE_ONCE(dev->irq, false);
}

static int tsr_begin(struct tsr_dev *dev)
{
	int error;

	dev->work = alloc_workqueue(TSR_NAME, WQ_UNBOUND, 0);
	if (!dev->work)
		return -ENOMEM;
	error = tsr_interrupts(dev);
	if (!error)
		error = tsr_queue_start_polling(dev);
	if (!error) {
		mutex_lock(&dev->lock);
		error = tsr_session_start(dev);
		dev->present = !error;
		mutex_unlock(&dev->lock);
	}
	return error;
}

static void tsr_end(struct tsr_dev *dev)
{
	mutex_lock(&dev->lock);
	dev->present = false;
	tsr_direct_end(dev);
	tsr_session_stop(dev);
	mutex_unlock(&dev->lock);
	tsr_checkpoint_end(dev);
	/* Before the end of interrupts, which the thread looks at. */
	tsr_queue_stop_polling(dev);
	tsr_no_interrupts(dev);
	tsr_nodes_remove(dev);
	tsr_proc_end(&dev->proc);
	if (dev->work)
		destroy_workqueue(dev->work);
	dev->work = NULL;
	/* What a device has that could not be stopped. */
	tsr_dma_end(dev);
}

static int tsr_map_bars(struct tsr_dev *dev)
{
	struct pci_dev *pdev = dev->pdev;
	int error;

	error = pci_enable_device_mem(pdev);
	if (error)
		return error;
	error = pci_request_selected_regions(pdev, TSR_BARS, TSR_NAME);
	if (error)
		goto disable;
	error = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (error)
		goto release;
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	dev->doorbell = pci_resource_start(pdev, TSR_BAR_DOORBELL);
	dev->doorbell_len = pci_resource_len(pdev, TSR_BAR_DOORBELL);
	error = -ENODEV;
	if (pci_resource_len(pdev, TSR_BAR_CONTROL) < PAGE_SIZE)
		goto release;
	dev->regs = pci_iomap(pdev, TSR_BAR_CONTROL, 0);
	if (!dev->regs)
		goto release;
	pci_set_master(pdev);
	return 0;

release:
	pci_release_selected_regions(pdev, TSR_BARS);
disable:
	pci_disable_device(pdev);
	return error;
}

static void tsr_unmap_bars(struct tsr_dev *dev)
{
	pci_clear_master(dev->pdev);
	pci_iounmap(dev->pdev, dev->regs);
	pci_release_selected_regions(dev->pdev, TSR_BARS);
	pci_disable_device(dev->pdev);
}

/* Makes a device the VM's vGPU. Files can be opened once it is present. */
static int tsr_dev_claim(struct tsr_dev *dev)
{
	int error = 0;

	mutex_lock(&tsr_current_lock);
	if (tsr_current)
		error = -EBUSY;
	else
		tsr_current = dev;
	mutex_unlock(&tsr_current_lock);
	if (error)
		dev_err(&dev->pdev->dev, "A VM can have one vGPU with this driver\n");
	return error;
}

static void tsr_dev_disclaim(void)
{
	mutex_lock(&tsr_current_lock);
	tsr_current = NULL;
	mutex_unlock(&tsr_current_lock);
}

static int tsr_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct tsr_dev *dev;
	int error;

	dev = tsr_dev_new(pdev);
	if (IS_ERR(dev))
		return PTR_ERR(dev);
	error = tsr_map_bars(dev);
	if (error)
		goto put;
	error = tsr_check(dev);
	if (error)
		goto unmap;
	error = tsr_dev_claim(dev);
	if (error)
		goto unmap;
	error = tsr_begin(dev);
	if (error)
		goto end;
	pci_set_drvdata(pdev, dev);
	return 0;

end:
	tsr_end(dev);
	tsr_dev_disclaim();
unmap:
	tsr_unmap_bars(dev);
put:
	tsr_dev_put(dev);
	return error;
}

static void tsr_remove(struct pci_dev *pdev)
{
	struct tsr_dev *dev = pci_get_drvdata(pdev);

	tsr_end(dev);
	/* Another vGPU cannot have the names of nodes and files before. */
	tsr_dev_disclaim();
	tsr_unmap_bars(dev);
	tsr_dev_put(dev);
}

/* Ends the session before the device loses its state. */
static void tsr_pause(struct pci_dev *pdev)
{
	struct tsr_dev *dev = pci_get_drvdata(pdev);

	mutex_lock(&dev->lock);
	dev->present = false;
	tsr_direct_end(dev);
	tsr_session_stop(dev);
	mutex_unlock(&dev->lock);
}

/* The next open() starts a session. */
static void tsr_resume(struct pci_dev *pdev)
{
	struct tsr_dev *dev = pci_get_drvdata(pdev);

	pci_set_master(pdev);
	mutex_lock(&dev->lock);
	dev->present = true;
	mutex_unlock(&dev->lock);
}

static int tsr_pm_suspend(struct device *device)
{
	tsr_pause(to_pci_dev(device));
	return 0;
}

static int tsr_pm_resume(struct device *device)
{
	tsr_resume(to_pci_dev(device));
	return 0;
}

static DEFINE_SIMPLE_DEV_PM_OPS(tsr_pm_ops, tsr_pm_suspend, tsr_pm_resume);

static const struct pci_error_handlers tsr_error_handlers = {
	.reset_prepare = tsr_pause,
	.reset_done = tsr_resume,
};

/*
 * A vGPU with a display (1234:1111) is the display driver's. It can be bound to this driver by
 * driver_override, instead of the display.
 */
static const struct pci_device_id tsr_ids[] = {
	{ PCI_DEVICE_SUB(0x1af4, 0x10f0, 0x1af4, 0x1100) },
	{ }
};
MODULE_DEVICE_TABLE(pci, tsr_ids);

static struct pci_driver tsr_driver = {
	.name = TSR_NAME,
	.id_table = tsr_ids,
	.probe = tsr_probe,
	.remove = tsr_remove,
	.shutdown = tsr_pause,
	.driver.pm = pm_sleep_ptr(&tsr_pm_ops),
	.err_handler = &tsr_error_handlers,
};

static int __init tsr_init(void)
{
	int error = tsr_nodes_init();

	if (error)
		return error;
	error = pci_register_driver(&tsr_driver);
	if (error)
		tsr_nodes_exit();
	return error;
}

static void __exit tsr_exit(void)
{
	pci_unregister_driver(&tsr_driver);
	tsr_nodes_exit();
}

module_init(tsr_init);
module_exit(tsr_exit);

MODULE_LICENSE("GPL");
MODULE_AUTHOR("The Tessera authors");
MODULE_DESCRIPTION("NVIDIA's device files in a VM, implemented by a Tessera vGPU");
MODULE_VERSION("0.1.0");
