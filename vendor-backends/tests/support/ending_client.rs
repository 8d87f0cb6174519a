//! A client of a GPU process, in a worker that ends at a certain step.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use mdev_core::gpu::{
    Adoption, Apertures, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientSpec,
    GpuDescription, GpuError, GuestRam, MapRequest, Pending, Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use vendor_backends::mediator::MediatedClient;

/// Steps of a worker.
#[derive(Clone, Debug, Default)]
pub struct Steps(Arc<Mutex<Count>>);

#[derive(Debug, Default)]
struct Count {
    done: u64,
    left: Option<u64>,
}

/// End of a worker: a panic that is not reported.
#[derive(Debug)]
pub struct Ended;

impl Steps {
    /// Ends the worker before the step after `steps` more.
    pub fn end_after(&self, steps: u64) {
        self.0.lock().unwrap().left = Some(steps);
    }

    /// Returns the number of steps so far.
    pub fn done(&self) -> u64 {
        self.0.lock().unwrap().done
    }

    /// Does a step, unless the worker ends.
    pub fn step(&self) {
        let mut count = self.0.lock().unwrap();
        if count.left == Some(0) {
            count.left = None;
            drop(count);
            std::panic::resume_unwind(Box::new(Ended));
        }
        count.done += 1;
        count.left = count.left.map(|left| left - 1);
    }
}

/// Client of a GPU process. A worker can end before a request, and before it has the reply.
#[derive(Debug)]
pub struct EndingClient {
    pub inner: MediatedClient,
    pub steps: Steps,
}

impl EndingClient {
    pub fn open(connection: &OwnedFd, steps: &Steps) -> Self {
        let inner = MediatedClient::open(connection.try_clone().unwrap()).unwrap();
        Self { inner, steps: steps.clone() }
    }

    pub fn adopt(connection: &OwnedFd, steps: &Steps, position: u64) -> Self {
        let connection = connection.try_clone().unwrap();
        let inner = MediatedClient::adopt(connection, position).unwrap();
        Self { inner, steps: steps.clone() }
    }

    fn request<T>(&mut self, request: impl FnOnce(&mut MediatedClient) -> T) -> T {
        self.steps.step();
        let reply = request(&mut self.inner);
        self.steps.step();
        reply
    }
}

impl Client for EndingClient {
    fn adoption(&mut self) -> Option<&mut dyn Adoption> {
        self.inner.adoption()
    }

    fn spec(&self) -> &ClientSpec {
        self.inner.spec()
    }

    fn gpu(&self) -> &GpuDescription {
        self.inner.gpu()
    }

    fn apertures(&self) -> &Apertures {
        self.inner.apertures()
    }

    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError> {
        self.request(|client| client.import(ram))
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        self.request(|client| client.release(memory))
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        self.request(Client::create_space)
    }

    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.request(|client| client.destroy_space(space))
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        self.request(|client| client.map(request))
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.request(|client| client.unmap(space, va, len))
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        self.request(|client| client.create_channel(spec))
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.request(|client| client.destroy_channel(id))
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        self.request(|client| client.query_channel(id))
    }

    fn wake(&mut self, token: Token) -> Result<(), GpuError> {
        self.inner.wake(token)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.inner.event()
    }

    fn set_interrupt(
        &mut self,
        vector: u32,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        self.inner.set_interrupt(vector, event)
    }

    fn take_pending(&mut self) -> Pending {
        self.inner.take_pending()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        self.request(Client::reset)
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        self.request(Client::usage)
    }
}
