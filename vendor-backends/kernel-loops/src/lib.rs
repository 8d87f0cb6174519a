//! Inner loops of the software GPU's kernels. Those of vectors are compiled for any CPU and for
//! CPUs with AVX2. Both give the same bits, because multiplications and additions are not fused.
//!
//! They are a crate so that they alone are optimized in all profiles.

/// Declares functions that select the faster of two compilations of one body.
macro_rules! twice {
    ($($(#[$doc:meta])* fn $name:ident / $wide:ident ($($arg:ident: $kind:ty),*) $(-> $result:ty)? = $body:path;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $wide($($arg: $kind),*) $(-> $result)? {
            $body($($arg),*)
        }

        $(#[$doc])*
        pub fn $name($($arg: $kind),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the CPU has AVX2.
                return unsafe { $wide($($arg),*) };
            }
            $body($($arg),*)
        }
    )*};
}

/// Rows and columns of a [`Tile`].
pub const TILE: usize = 64;
/// Part of a matrix, in row-major order.
pub type Tile = [f32; TILE * TILE];
/// Number of points of [`Orbits`].
pub const POINTS: usize = 64;

twice! {
    /// Computes `y = a * x + y`.
    fn saxpy / saxpy_wide(a: f32, x: &[f32], y: &mut [f32]) = saxpy_body;
    /// Adds the product of two tiles to a third, for `rows` rows of A and `depth` columns of A.
    fn multiply / multiply_wide(a: &Tile, b: &Tile, c: &mut Tile, rows: usize, depth: usize) = multiply_body;
}

#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "it is compiled into each caller for that caller's features"
)]
fn saxpy_body(a: f32, x: &[f32], y: &mut [f32]) {
    for (x, y) in x.iter().zip(y) {
        *y += a * *x;
    }
}

/// Rows of C that are computed together, so that their sums stay in registers.
const STRIP: usize = 4;
/// Columns of C that are computed together.
const LANES: usize = 16;

#[inline(always)]
#[allow(clippy::inline_always, reason = "as above")]
fn multiply_body(a: &Tile, b: &Tile, c: &mut Tile, rows: usize, depth: usize) {
    for top in (0..rows.min(TILE)).step_by(STRIP) {
        for left in (0..TILE).step_by(LANES) {
            let mut sum = [[0f32; LANES]; STRIP];
            for (row, sum) in sum.iter_mut().enumerate() {
                sum.copy_from_slice(&c[(top + row) * TILE + left..][..LANES]);
            }
            for k in 0..depth.min(TILE) {
                let b = &b[k * TILE + left..][..LANES];
                for (row, sum) in sum.iter_mut().enumerate() {
                    let a = a[(top + row) * TILE + k];
                    for (sum, b) in sum.iter_mut().zip(b) {
                        *sum += a * *b;
                    }
                }
            }
            for (row, sum) in sum.iter().enumerate() {
                c[(top + row) * TILE + left..][..LANES].copy_from_slice(sum);
            }
        }
    }
}

/// Iterations between checks whether all points have escaped, and iterations of one step.
const CHECK: u32 = 8;
const ITERATIONS: u32 = 128;

/// Orbits of adjacent points, in progress.
#[derive(Clone, Debug)]
pub struct Orbits {
    re: [f32; POINTS],
    im: f32,
    zr: [f32; POINTS],
    zi: [f32; POINTS],
    /// Iterations before the point escaped.
    count: [u32; POINTS],
    /// All ones until the point has escaped.
    inside: [u32; POINTS],
    done: u32,
}

impl Orbits {
    /// Creates orbits of points with the given real parts, by lane.
    pub fn new(re: impl Fn(usize) -> f32, im: f32) -> Self {
        let re = std::array::from_fn(re);
        Self {
            re,
            im,
            zr: [0.0; POINTS],
            zi: [0.0; POINTS],
            count: [0; POINTS],
            inside: [u32::MAX; POINTS],
            done: 0,
        }
    }

    /// Returns for each point the iterations before it escaped, or `None` if it did not.
    pub fn iterations(&self) -> impl Iterator<Item = Option<u32>> {
        self.count.iter().zip(&self.inside).map(|(count, inside)| (*inside == 0).then_some(*count))
    }

    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as above")]
    fn iterate(&mut self) {
        for lane in 0..POINTS {
            let (zr, zi) = (self.zr[lane], self.zi[lane]);
            let (zr2, zi2) = (zr * zr, zi * zi);
            // Escaped lanes continue towards infinity or NaN; their values are ignored.
            let escaped = if zr2 + zi2 > 4.0 { u32::MAX } else { 0 };
            self.inside[lane] &= !escaped;
            self.count[lane] += self.inside[lane] & 1;
            self.zi[lane] = (zr + zr) * zi + self.im;
            self.zr[lane] = zr2 - zi2 + self.re[lane];
        }
    }

    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as above")]
    fn advance_body(&mut self, max: u32) -> bool {
        let mut this_step = 0;
        while self.done < max && this_step < ITERATIONS {
            for _ in 0..CHECK.min(max - self.done) {
                self.iterate();
                self.done += 1;
            }
            this_step += CHECK;
            if self.inside.iter().all(|inside| *inside == 0) {
                return true;
            }
        }
        self.done >= max
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn advance_wide(&mut self, max: u32) -> bool {
        self.advance_body(max)
    }

    /// Runs one step. Returns true if all points have escaped or reached `max` iterations.
    pub fn advance(&mut self, max: u32) -> bool {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { self.advance_wide(max) };
        }
        self.advance_body(max)
    }
}

/// Runs `steps` steps of a linear congruential generator. Returns its next state.
pub fn spin(mut state: u32, steps: u64) -> u32 {
    for _ in 0..steps {
        state = std::hint::black_box(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    }
    state
}
