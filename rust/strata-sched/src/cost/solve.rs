//! Least squares with coefficients that are never negative, for two or three unknowns: exact, no allocation.

/// The `N` unknowns that fit the normal equations best, none below zero. `gram` is symmetric; `pull` says how
/// strongly an unknown that the equations leave open stays at `anchor`, relative to what they say about it.
pub(super) fn nonnegative<const N: usize>(
    gram: &[[f64; N]; N],
    right: &[f64; N],
    anchor: &[f64; N],
    pull: f64,
) -> [f64; N] {
    // Every unknown in its own unit, so that seconds per byte and seconds per step can be compared.
    let unit: [f64; N] = std::array::from_fn(|row| match gram[row][row] > 0.0 {
        true => gram[row][row].sqrt(),
        false => 1.0,
    });
    let scaled: [[f64; N]; N] = std::array::from_fn(|row| {
        std::array::from_fn(|column| {
            let ridge = if row == column { pull } else { 0.0 };
            gram[row][column] / (unit[row] * unit[column]) + ridge
        })
    });
    let target: [f64; N] = std::array::from_fn(|row| right[row] / unit[row] + pull * anchor[row] * unit[row]);
    // The best of all choices of unknowns that are not zero, since there are at most eight.
    let mut best = ([0.0; N], 0.0);
    for used in 1..1usize << N {
        let is_used = |index: usize| used >> index & 1 == 1;
        let solution = eliminate(&scaled, &target, is_used);
        let gain: f64 = (0..N).map(|row| solution[row] * target[row]).sum();
        if gain > best.1 && solution.iter().all(|value| *value >= 0.0) {
            best = (solution, gain);
        }
    }
    std::array::from_fn(|index| best.0[index] / unit[index])
}

/// Solves the equations of the used unknowns; the others are zero. The ridge keeps every pivot away from zero.
fn eliminate<const N: usize>(
    matrix: &[[f64; N]; N],
    target: &[f64; N],
    is_used: impl Fn(usize) -> bool,
) -> [f64; N] {
    let (mut matrix, mut target) = (*matrix, *target);
    for pivot in (0..N).filter(|index| is_used(*index)) {
        for row in (pivot + 1..N).filter(|index| is_used(*index)) {
            let factor = matrix[row][pivot] / matrix[pivot][pivot];
            let above = matrix[pivot];
            for (value, above) in matrix[row].iter_mut().zip(above) {
                *value -= factor * above;
            }
            target[row] -= factor * target[pivot];
        }
    }
    let mut solution = [0.0; N];
    for row in (0..N).rev().filter(|index| is_used(*index)) {
        let known: f64 = (row + 1..N).map(|column| matrix[row][column] * solution[column]).sum();
        solution[row] = (target[row] - known) / matrix[row][row];
    }
    solution
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_unknown_that_would_be_negative_is_zero() {
        let solution = nonnegative(&[[2.0, 1.0], [1.0, 2.0]], &[3.0, 0.0], &[0.0, 0.0], 0.0);
        assert_eq!(solution, [1.5, 0.0]);
    }

    #[test]
    fn an_unknown_that_nothing_speaks_of_keeps_its_anchor() {
        let solution = nonnegative(&[[4.0, 0.0], [0.0, 0.0]], &[10.0, 0.0], &[0.0, 7.0], 0.25);
        assert_eq!(solution, [2.0, 7.0]);
    }

    proptest! {
        /// No small step in any direction that keeps the unknowns at or above zero does better.
        #[test]
        fn nothing_near_by_is_better(
            rows in prop::collection::vec((prop::array::uniform3(0.0f64..2.0), 0.0f64..3.0), 3..9),
            anchor in prop::array::uniform3(0.0f64..2.0), pull in 0.001f64..0.5,
        ) {
            let mut gram = [[0.0; 3]; 3];
            let mut right = [0.0; 3];
            for (x, y) in &rows {
                for row in 0..3 {
                    right[row] += x[row] * y;
                    for column in 0..3 {
                        gram[row][column] += x[row] * x[column];
                    }
                }
            }
            let loss = |at: &[f64; 3]| -> f64 {
                let fit: f64 = rows.iter()
                    .map(|(x, y)| (x.iter().zip(at).map(|(x, c)| x * c).sum::<f64>() - y).powi(2)).sum();
                let ridge: f64 = (0..3).map(|i| pull * gram[i][i] * (at[i] - anchor[i]).powi(2)).sum();
                fit + ridge
            };
            let solution = nonnegative(&gram, &right, &anchor, pull);
            prop_assert!(solution.iter().all(|value| *value >= 0.0));
            for index in 0..3 {
                for step in [-1e-3, 1e-3] {
                    let mut near = solution;
                    near[index] = (near[index] + step).max(0.0);
                    prop_assert!(loss(&near) >= loss(&solution) - 1e-9);
                }
            }
        }
    }
}
