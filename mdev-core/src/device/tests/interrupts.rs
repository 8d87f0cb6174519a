use super::*;
use crate::gpu::Pending;

const ENABLE_ALL: u32 = 0x7;

impl Guest {
    fn raise(&mut self, pending: Pending) {
        self.record.lock().unwrap().pending = Some(pending);
        self.function.on_gpu_event();
    }

    fn msi(&mut self, count: usize) -> Vec<EventFd> {
        let (events, fds): (Vec<_>, Vec<_>) = (0..count).map(|_| event()).unzip();
        let fds = fds.into_iter().map(Some).collect();
        self.set_triggers(IrqIndex::Msi, fds);
        events
    }

    fn intx(&mut self) -> EventFd {
        let (trigger, fd) = event();
        self.set_triggers(IrqIndex::Intx, vec![Some(fd)]);
        trigger
    }
}

#[test]
fn intx_follows_status_and_enable() {
    let mut guest = Guest::new();
    let line = guest.intx();
    guest.raise(Pending::NONSTALL);
    assert_eq!(signals(&line), 0, "not enabled");
    assert_eq!(guest.read32(CONTROL, reg::INTR_STATUS), 1);
    assert_eq!(guest.read32(CONFIG, 4) >> 16 & 8, 0);
    guest.write32(CONTROL, reg::INTR_ENABLE, ENABLE_ALL);
    assert_eq!(signals(&line), 1);
    assert_eq!(guest.read32(CONFIG, 4) >> 16 & 8, 8, "interrupt status");
    guest.function.change_interrupts(|irq| irq.mask(IrqIndex::Intx, 0, &[true], false)).unwrap();
    assert_eq!(signals(&line), 1, "still asserted after the client's unmask");
    guest.write32(CONTROL, reg::INTR_STATUS, 1);
    guest.function.change_interrupts(|irq| irq.mask(IrqIndex::Intx, 0, &[true], false)).unwrap();
    assert_eq!(signals(&line), 0);
    guest.write16(CONFIG, 4, 1 << 10);
    guest.raise(Pending::CHANNEL_ERROR);
    assert_eq!(signals(&line), 0, "INTx is disabled");
    guest.write16(CONFIG, 4, 0);
    assert_eq!(signals(&line), 1);
}

#[test]
fn the_gpu_gets_msi_vectors_while_non_stall_interrupts_are_enabled() {
    let mut guest = Guest::new();
    let events = guest.msi(4);
    assert_eq!(guest.record.lock().unwrap().interrupts, [false; 4]);
    guest.write32(CONTROL, reg::INTR_ENABLE, ENABLE_ALL);
    assert_eq!(guest.record.lock().unwrap().interrupts, [true; 4]);

    guest.raise(Pending::NONSTALL);
    assert!(events.iter().all(|event| signals(event) == 0), "the GPU signals the vectors");
    guest.raise(Pending::CHANNEL_ERROR | Pending::NONSTALL);
    assert_eq!(events.iter().map(signals).collect::<Vec<_>>(), [1, 0, 0, 0]);

    guest.write32(CONTROL, reg::INTR_ENABLE, 0);
    assert_eq!(guest.record.lock().unwrap().interrupts, [false; 4]);
    guest.write32(CONTROL, reg::INTR_ENABLE, ENABLE_ALL);
    guest.function.change_interrupts(|irq| irq.disable(IrqIndex::Msi));
    assert_eq!(guest.record.lock().unwrap().interrupts, [false; 4]);
}

#[test]
fn enabling_a_pending_condition_interrupts() {
    let mut guest = Guest::new();
    let events = guest.msi(1);
    guest.raise(Pending::CHANNEL_ERROR);
    assert_eq!(signals(&events[0]), 0);
    guest.write32(CONTROL, reg::INTR_ENABLE, 2);
    assert_eq!(signals(&events[0]), 1);
}

#[test]
fn a_condition_that_the_gpu_signalled_is_readable_at_once() {
    let mut guest = Guest::new();
    guest.record.lock().unwrap().pending = Some(Pending::NONSTALL);
    assert_eq!(guest.read32(CONTROL, reg::INTR_STATUS), 1);
}

#[test]
fn a_lost_gpu_is_reported_once_and_fails_every_request() {
    let mut guest = Guest::new();
    let events = guest.msi(1);
    guest.write32(CONTROL, reg::INTR_ENABLE, ENABLE_ALL);
    guest.record.lock().unwrap().lost = true;
    guest.write32(CONTROL, reg::WAKE, 1);
    guest.write32(CONTROL, reg::WAKE, 1);
    assert_eq!(signals(&events[0]), 1);
    assert_eq!(guest.read32(CONTROL, reg::STATUS), 2);
    assert_eq!(guest.request(Opcode::GetInfo, &[]).0, Status::DeviceLost);
    assert!(!guest.function.gpu_ok());
    assert!(guest.function.warnings().iter().any(|line| line.contains("lost")));
}
