//! Requests of a known length at a known rate, alone and beside a busy vGPU: latency, the work left
//! to the busy vGPU, and the usage that the manager reports.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use system_tests::outcome::measuring;

use crate::diary::Pages;
use crate::fleet::Fleet;
use crate::load::{LoadSpec, Progress};
use crate::paced::{Due, Latency, RequestSpec, Requests};
use crate::tenant::{self, Order, Tenant};
use crate::{Bench, GpuKind};

/// Kernels of the busy vGPU, which are queued deep as a training's are.
const BUSY_KERNEL: Duration = Duration::from_micros(100);
/// Kernel lengths in microseconds, and requests per second.
const LENGTHS: [u32; 4] = [100, 300, 1000, 5000];
const RATES: [u32; 5] = [1, 20, 100, 400, 1000];
/// Largest part of the GPU that requests ask for, in microseconds per second.
const MOST_ASKED: u32 = 600_000;
/// Requests of a quick run.
const QUICK: [(u32, u32); 2] = [(300, 100), (300, 400)];
/// Shortest time of requests, also of a quick measurement: some means of the reported usage.
const SHORTEST: Duration = Duration::from_secs(8);
const SHORTEST_QUICK: Duration = Duration::from_secs(3);

/// Kernel of requests after a pause, and of those of many services.
const REQUEST: u32 = 300;
/// Pauses before requests, and numbers of requests.
const PAUSES: [(Duration, u32); 3] =
    [(Duration::from_millis(10), 200), (Duration::from_secs(1), 10), (Duration::from_secs(10), 4)];
const QUICK_PAUSES: [(Duration, u32); 2] =
    [(Duration::from_millis(10), 20), (Duration::from_secs(1), 2)];

/// Services beside one busy vGPU, and requests per second of each.
const SERVICES: u32 = 8;
const RATE_OF_SERVICES: u32 = 50;

/// Time in which an NVIDIA GPU changes contexts, as measured on H100s.
const NVIDIA_SWITCH: Duration = Duration::from_micros(150);

/// The manager's figures of usage are means over the last second.
const MEAN: Duration = Duration::from_millis(1100);
/// Largest error of a reported usage, in hundredths of the GPU.
const USAGE_ERROR: f64 = 1.0;

/// Bounds for requests of one length and rate, in milliseconds and as a part of the work left.
#[derive(Clone, Copy, Default)]
struct Promise {
    p50: Option<f64>,
    p99: Option<f64>,
    worst: Option<f64>,
    busy: Option<f64>,
}

/// Returns what is promised for requests of this length, so many a second.
fn promise(length: u32, rate: u32) -> Promise {
    match (length, rate) {
        (_, 1) if length <= REQUEST => {
            Promise { p50: Some(1.0), worst: Some(3.0), ..Promise::default() }
        }
        (300, 100) => {
            Promise { p99: Some(1.2), worst: Some(3.0), busy: Some(0.97), ..Promise::default() }
        }
        (300, 400) => {
            Promise { p50: Some(0.6), p99: Some(2.0), busy: Some(0.95), ..Promise::default() }
        }
        _ => Promise::default(),
    }
}

/// Promise of each of several services.
const OF_SERVICES: Promise = Promise { p50: None, p99: Some(3.0), worst: None, busy: Some(0.9) };

/// Requests beside a busy vGPU.
struct Beside {
    /// Latencies of each vGPU with requests.
    latencies: Vec<Latency>,
    /// Work of the busy vGPU as a part of its work without requests.
    busy: f64,
    /// Part of the GPU's time that the kernels of all requests need.
    used: f64,
    /// Part of the GPU's time in which it changes to requests and back.
    switching: f64,
    /// Usage of all vGPUs with requests that the manager reported, in hundredths of the GPU.
    usage: f64,
    pages: Pages,
}

impl Bench<'_> {
    /// Measures requests beside a busy vGPU.
    pub fn requests(&mut self, quick: bool) -> Result<()> {
        let mut fleet = self.large_fleet(&equal(2))?;
        let asked = |(length, rate): &(u32, u32)| length * rate <= MOST_ASKED;
        let all = LENGTHS.into_iter().flat_map(|length| RATES.map(|rate| (length, rate)));
        let all: Vec<_> = all.filter(asked).collect();
        for &(length, rate) in if quick { QUICK.as_slice() } else { &all } {
            let what = format!("requests of {} ms, {rate}/s", f64::from(length) / 1e3);
            self.attempt(&what, |bench| bench.requests_of(&mut fleet, &what, length, rate, quick));
        }
        for &(pause, count) in if quick { QUICK_PAUSES.as_slice() } else { &PAUSES } {
            let what = format!("a request after {} ms", pause.as_millis());
            self.attempt(&what, |bench| bench.after_pause(&mut fleet, &what, pause, count));
        }
        drop(fleet);
        self.attempt("eight services", |bench| bench.services(quick));
        Ok(())
    }

    /// Measures requests of one length and rate.
    fn requests_of(
        &mut self,
        fleet: &mut Fleet,
        what: &str,
        length: u32,
        rate: u32,
        quick: bool,
    ) -> Result<()> {
        let spec = self.request_spec(length, Duration::from_secs(1) / rate, quick);
        // A quarter of the requests suffices without a neighbour.
        let few = RequestSpec { count: (spec.count / 4).max(3), ..spec };
        busy_one(fleet)?.load(LoadSpec::default())?;
        let alone = Latency::of(&requests(&mut fleet.tenants[0], few)?.latencies)?;
        let beside = self.beside_busy(fleet, &[spec])?;
        let promise = promise(length, rate);
        self.latency_row(what, Some(alone), &beside, promise);
        self.busy_row(what, &beside, promise);
        self.usage_row(what, &beside);
        Ok(())
    }

    /// Measures requests after pauses beside a busy vGPU.
    fn after_pause(
        &mut self,
        fleet: &mut Fleet,
        what: &str,
        pause: Duration,
        count: u32,
    ) -> Result<()> {
        let spec = RequestSpec {
            due: Due::After(pause),
            count,
            ..self.request_spec(REQUEST, pause, true)
        };
        let beside = self.beside_busy(fleet, &[spec])?;
        self.latency_row(what, None, &beside, Promise::default());
        Ok(())
    }

    /// Measures several vGPUs with requests beside a busy one.
    fn services(&mut self, quick: bool) -> Result<()> {
        let mut fleet = self.large_fleet(&equal(SERVICES as usize + 1))?;
        // Services do not know each other. With slightly different intervals, requests of any two
        // come at all distances.
        let interval = Duration::from_secs(1) / RATE_OF_SERVICES;
        let services = (0..SERVICES).map(|index| RequestSpec {
            offset: interval / SERVICES * index,
            ..self.request_spec(REQUEST, interval + interval / 200 * index, quick)
        });
        let specs: Vec<_> = services.collect();
        let beside = self.beside_busy(&mut fleet, &specs)?;
        let what = format!(
            "{SERVICES} services, {} ms, {RATE_OF_SERVICES}/s each",
            f64::from(REQUEST) / 1e3
        );
        self.latency_row(&what, None, &beside, OF_SERVICES);
        self.busy_row(&what, &beside, OF_SERVICES);
        Ok(())
    }

    /// Adds the row of the longest latencies of all vGPUs with requests.
    fn latency_row(
        &mut self,
        what: &str,
        alone: Option<Latency>,
        beside: &Beside,
        promise: Promise,
    ) {
        let longest =
            |figure: fn(&Latency) -> f64| beside.latencies.iter().map(figure).fold(0.0, f64::max);
        let latency = Latency {
            p50: longest(|one| one.p50),
            p99: longest(|one| one.p99),
            worst: longest(|one| one.worst),
        };
        let bounds = [
            ("p50", latency.p50, promise.p50),
            ("p99", latency.p99, promise.p99),
            ("worst", latency.worst, promise.worst),
        ];
        let kept = bounds.iter().all(|(_, seen, bound)| bound.is_none_or(|bound| *seen <= bound));
        let verdict: Vec<_> = bounds
            .iter()
            .filter_map(|(name, _, bound)| bound.map(|bound| format!("{name} {bound} ms")))
            .collect();
        let row = format!("{what}: latency, p50 / p99 / worst");
        let alone = alone.map(|alone| format!("alone {}", alone.text())).unwrap_or_default();
        self.row(&row, alone, latency.text(), verdict.join(", "), kept);
        if !kept && self.promised() {
            eprint!("{}", beside.pages.text());
        }
    }

    /// Adds the row of the usage that the manager reported.
    fn usage_row(&mut self, what: &str, beside: &Beside) {
        let used = beside.used * 100.0;
        let off = (beside.usage - used).abs();
        let row = format!("{what}: usage in the statistics");
        let (used, seen) = (format!("used {used:.2} %"), format!("{:.2} %", beside.usage));
        let verdict = format!("{off:.2} points off ({USAGE_ERROR})");
        self.row(&row, used, seen, verdict, off <= USAGE_ERROR);
    }

    /// Adds the row of the work that the busy vGPU did of what the requests and their switches
    /// left.
    fn busy_row(&mut self, what: &str, beside: &Beside, promise: Promise) {
        let left = 1.0 - beside.used - beside.switching;
        let part = beside.busy / left;
        let kept = promise.busy.is_none_or(|bound| part >= bound);
        let verdict = promise.busy.map(|bound| format!("{bound} of it")).unwrap_or_default();
        let row = format!("{what}: work of the busy vGPU");
        let left = format!("left {:.1} %", left * 100.0);
        let seen = format!("{:.1} %, {part:.3} of it", beside.busy * 100.0);
        self.row(&row, left, seen, verdict, kept);
        if !kept && self.promised() {
            eprint!("{}", beside.pages.text());
        }
    }

    /// Runs requests on the first vGPUs while the last one is busy. The work of the busy one is
    /// measured before, too.
    fn beside_busy(&self, fleet: &mut Fleet, specs: &[RequestSpec]) -> Result<Beside> {
        let busy = std::slice::from_mut(busy_one(fleet)?);
        self.start_loads_of(busy, &[self.kernels(BUSY_KERNEL)])?;
        let before = work_per_second(&tenant::measure(busy, self.window)?, self.window);
        let length = specs.iter().map(RequestSpec::length).max().unwrap_or_default();
        let (tenants, diary) = fleet.parts();
        let (told, pages) = diary.keep(|| {
            for (tenant, spec) in tenants.iter_mut().zip(specs) {
                tenant.tell(&Order::Requests(*spec))?;
            }
            let (busy, services) = tenants.split_last_mut().context("There is no vGPU")?;
            let during = tenant::measure(std::slice::from_mut(busy), length);
            // All answers are read, so that those of the next orders are not mistaken for them.
            let requests = services.iter_mut().take(specs.len()).map(Tenant::hear::<Requests>);
            let requests: Vec<_> = requests.collect();
            anyhow::Ok((during?, requests.into_iter().collect::<Result<Vec<_>>>()?))
        });
        let (during, requests) = told?;
        let usage = (0..specs.len()).map(|index| pages.mean(index, "share_measured", MEAN, length));
        Ok(Beside {
            latencies: requests
                .iter()
                .map(|one| Latency::of(&one.latencies))
                .collect::<Result<_>>()?,
            busy: work_per_second(&during, length) / before,
            used: requests.iter().map(|one| one.used).sum(),
            switching: self.switching(specs),
            usage: usage.sum(),
            pages,
        })
    }

    /// Returns the part of the time in which the GPU changes contexts, twice for each request.
    fn switching(&self, specs: &[RequestSpec]) -> f64 {
        let each = if self.kind == GpuKind::Nvidia { 2 * NVIDIA_SWITCH } else { Duration::ZERO };
        let changing =
            |spec: &RequestSpec| (each * spec.count).as_secs_f64() / spec.length().as_secs_f64();
        specs.iter().map(changing).sum()
    }

    /// Returns requests of so many microseconds, one in each interval.
    fn request_spec(&self, length: u32, interval: Duration, quick: bool) -> RequestSpec {
        let time = match (quick, measuring()) {
            (false, _) => self.window.max(SHORTEST),
            (true, true) => self.window.max(SHORTEST_QUICK),
            (true, false) => self.window,
        };
        let count = time.as_nanos() / interval.as_nanos();
        RequestSpec {
            kernel: Duration::from_micros(length.into()),
            pace: self.pace,
            due: Due::Every(interval),
            offset: Duration::ZERO,
            count: u32::try_from(count).unwrap_or(u32::MAX).max(1),
        }
    }
}

/// Returns the tenant of the busy vGPU, which is the last one.
fn busy_one(fleet: &mut Fleet) -> Result<&mut Tenant> {
    fleet.tenants.last_mut().context("There is no vGPU")
}

fn requests(tenant: &mut Tenant, spec: RequestSpec) -> Result<Requests> {
    tenant.tell(&Order::Requests(spec))?;
    tenant.hear()
}

fn work_per_second(of: &[Progress], window: Duration) -> f64 {
    of.iter().map(|one| one.kernels).sum::<f64>() / window.as_secs_f64()
}

/// Returns the attributes of so many vGPUs with equal shares.
fn equal(count: usize) -> Vec<Value> {
    vec![json!([{ "core": (100 / count).to_string() }]); count]
}
