//! State of the queue's thread that accesses of a guest use: nothing here waits for a request.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foreign_fds::ForeignFd;
use mdev_core::abi::queue::{self, Failure, State};
use mdev_core::gpu::{DoorbellWatch, Pending};
use mdev_core::ids::GuestPa;
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde::{Deserialize, Serialize};

/// Change of the queue that a guest wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Serve the queue at this address, with so many slots.
    Start(GuestPa, u32),
    /// Stop to serve it.
    Stop,
}

/// Orders with their numbers, so that each is carried out once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// Number of the last order.
    last: u64,
    /// Number of the last order that is done.
    done: u64,
    waiting: VecDeque<(u64, Order)>,
}

impl Orders {
    /// Adopts the orders of an earlier worker, whose thread has done those up to `done`.
    pub fn adopt(mut self, done: u64) -> Self {
        self.waiting.retain(|(number, _)| *number > done);
        self.done = done;
        self
    }

    /// Adds an order. Returns false if an earlier worker has done it.
    fn add(&mut self, order: Order) -> bool {
        self.last += 1;
        let is_new = self.last > self.done;
        if is_new {
            self.waiting.push_back((self.last, order));
        }
        is_new
    }

    /// Returns the state while the next order waits.
    fn state(&self) -> Option<State> {
        self.waiting.back().map(|(_, order)| match order {
            Order::Start(..) => State::Starting,
            Order::Stop => State::Stopping,
        })
    }
}

/// Signals between the queue's thread and the event loop.
#[derive(Debug)]
pub struct Signals {
    orders: Mutex<Orders>,
    /// Readable when the thread has something to do.
    work: EventFd,
    status: AtomicU32,
    pending: AtomicU32,
    unsignalled: AtomicU32,
    /// Readable when `unsignalled` has conditions, or when the state has changed.
    event: EventFd,
    interrupt: Mutex<Option<ForeignFd>>,
    doorbell: Mutex<Option<Arc<dyn DoorbellWatch>>>,
    /// The guest has woken the engine.
    woken: AtomicBool,
    /// The engine is to be woken: the client was in use.
    wake_client: AtomicBool,
    /// The thread is to end.
    pub stopped: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal(event: &impl AsFd) {
    // A full counter is readable as well.
    let _ = nix::unistd::write(event, &1_u64.to_ne_bytes());
}

fn clear(event: &EventFd) {
    // It is empty if another call has read it.
    let _ = event.read();
}

impl Signals {
    /// Creates signals of a queue that is off.
    pub fn new() -> io::Result<Self> {
        let event = || {
            let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
            EventFd::from_flags(flags).map_err(io::Error::from)
        };
        Ok(Self {
            orders: Mutex::default(),
            work: event()?,
            status: AtomicU32::new(queue::status(State::Off, None)),
            pending: AtomicU32::new(0),
            unsignalled: AtomicU32::new(0),
            event: event()?,
            interrupt: Mutex::default(),
            doorbell: Mutex::default(),
            woken: AtomicBool::new(false),
            wake_client: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        })
    }

    /// Returns the descriptor that is readable when the thread has something to do.
    pub fn work(&self) -> &EventFd {
        &self.work
    }

    /// Returns the descriptor that is readable when the event loop has something to do.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Tells the thread that there is something to do.
    pub fn notify(&self) {
        signal(&self.work);
    }

    /// Notes that the thread looks for what there is to do.
    pub fn take_work(&self) {
        clear(&self.work);
    }

    /// Gives an order and shows the state until it is done.
    pub fn order(&self, order: Order) {
        let mut orders = lock(&self.orders);
        if orders.add(order) {
            self.show_order(&orders);
        }
        drop(orders);
        self.notify();
    }

    fn show_order(&self, orders: &Orders) {
        if let Some(state) = orders.state() {
            self.status.store(queue::status(state, None), Ordering::SeqCst);
        }
    }

    /// Returns the next order.
    pub fn next_order(&self) -> Option<(u64, Order)> {
        lock(&self.orders).waiting.front().copied()
    }

    /// Removes the order that is done.
    pub fn remove_order(&self, number: u64) {
        lock(&self.orders).waiting.retain(|(waiting, _)| *waiting > number);
    }

    /// Returns the orders.
    pub fn orders(&self) -> Orders {
        lock(&self.orders).clone()
    }

    /// Adopts the orders and the status of an earlier worker.
    pub fn adopt(&self, orders: Orders, status: u32) {
        self.status.store(status, Ordering::SeqCst);
        self.show_order(&orders);
        *lock(&self.orders) = orders;
        if self.status().0 != State::Off {
            // What that worker had taken, and not passed on, is pending again.
            self.add(Pending::NONSTALL | Pending::CHANNEL_ERROR);
            self.interrupt();
        }
    }

    /// Returns the queue to its initial state, except for its descriptors.
    pub fn reset(&self) {
        lock(&self.orders).waiting.clear();
        self.pending.store(0, Ordering::SeqCst);
        self.unsignalled.store(0, Ordering::SeqCst);
        self.woken.store(false, Ordering::SeqCst);
        self.status.store(queue::status(State::Off, None), Ordering::SeqCst);
    }

    /// Returns the state and the value of `QUEUE_STATUS`.
    pub fn status(&self) -> (State, u32) {
        let status = self.status.load(Ordering::SeqCst);
        let states = [State::Off, State::Starting, State::Running, State::Stopping, State::Failed];
        let state = states.into_iter().find(|state| *state as u32 == status & 0xff);
        (state.unwrap_or(State::Failed), status)
    }

    /// Shows a state and interrupts the guest.
    pub fn set_state(&self, state: State, failure: Option<Failure>) {
        self.status.store(queue::status(state, failure), Ordering::SeqCst);
        self.interrupt();
        signal(&self.event);
    }

    /// Interrupts the guest: there are completions, or another state.
    pub fn interrupt(&self) {
        self.pending.fetch_or(Pending::QUEUE.bits(), Ordering::SeqCst);
        match &*lock(&self.interrupt) {
            Some(event) => signal(event),
            None => self.raise(Pending::QUEUE),
        }
    }

    /// Adds conditions of the GPU. The guest sees them in its registers, and errors interrupt.
    pub fn add(&self, pending: Pending) {
        self.pending.fetch_or(pending.bits(), Ordering::SeqCst);
        let errors = pending & (Pending::CHANNEL_ERROR | Pending::DEVICE_LOST);
        if !errors.is_empty() {
            self.raise(errors);
        }
    }

    fn raise(&self, pending: Pending) {
        self.unsignalled.fetch_or(pending.bits(), Ordering::SeqCst);
        signal(&self.event);
    }

    /// Returns the conditions since the last call, and those that are not signalled yet.
    pub fn take_pending(&self) -> (Pending, Pending) {
        clear(&self.event);
        let signal = self.unsignalled.swap(0, Ordering::SeqCst);
        let pending = self.pending.swap(0, Ordering::SeqCst) | signal;
        (Pending::from_bits_truncate(pending), Pending::from_bits_truncate(signal))
    }

    /// Sets the eventfd of the guest's interrupt.
    pub fn set_interrupt(&self, event: Option<ForeignFd>) {
        *lock(&self.interrupt) = event;
    }

    /// Sets the watch of the doorbell page.
    pub fn set_doorbell(&self, watch: Option<Arc<dyn DoorbellWatch>>) {
        *lock(&self.doorbell) = watch;
    }

    /// Notes that the guest has woken the engine. The thread wakes the client later if `deferred`.
    pub fn wake(&self, deferred: bool) {
        self.wake_client.fetch_or(deferred, Ordering::SeqCst);
        self.woken.store(true, Ordering::SeqCst);
        let doorbell = lock(&self.doorbell);
        if let Some(watch) = &*doorbell {
            watch.resume();
        }
        if deferred || doorbell.is_some() {
            self.notify();
        }
    }

    /// Returns whether the guest has woken the engine since the last call.
    pub fn take_woken(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }

    /// Returns whether the client is to be woken, once.
    pub fn take_wake_client(&self) -> bool {
        self.wake_client.swap(false, Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_is_carried_out_once() {
        let (start, stop) = (Order::Start(GuestPa(4096), 8), Order::Stop);
        let mut orders = Orders::default();
        assert!(orders.add(start) && orders.add(stop));
        assert_eq!(orders.state(), Some(State::Stopping));
        // The worker before has done the first one.
        let mut next = orders.clone().adopt(1);
        assert_eq!(next.waiting, [(2, stop)]);
        assert!(next.add(start));
        // It has done both, and one whose message comes again.
        let mut next = orders.adopt(3);
        assert_eq!((next.waiting.len(), next.state()), (0, None));
        assert!(!next.add(start));
        assert!(next.add(stop));
        assert_eq!(next.waiting, [(4, stop)]);
    }
}
