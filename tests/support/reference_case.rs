//! Calls of attention, and their comparison with the reference.

use super::{
    Array, AttentionCase, InvalidMetadata, Invocation, U8, assert_matches_expected, clamped_sequences, expected_rows,
    for_each_side,
};

/// Asserts that results match the expected ones.
pub type Comparison<'a> = Box<dyn Fn(&[Array]) + 'a>;

/// A call of attention with a reference.
pub trait ReferenceCase {
    /// The forward call that is computed or differentiated.
    fn case(&self) -> &AttentionCase;

    fn case_mut(&mut self) -> &mut AttentionCase;

    fn call(&self) -> Invocation;

    /// The results that the call computes: those before the workspace, or before one that was not requested.
    fn computed(&self, results: &[Array]) -> Vec<Array> {
        let end = results.iter().position(|x| x.dtype == U8 || x.dims == [0]);
        results[..end.unwrap_or(results.len())].to_vec()
    }

    /// The comparison of results with the reference.
    fn comparison(&self, invalid_metadata: InvalidMetadata) -> Comparison<'_>;

    /// Whether two runs give the same bits.
    fn is_deterministic(&self) -> bool {
        true
    }

    /// Runs the call with guard pages on either side and compares with the reference. Returns the results of each run.
    fn compare_with_reference(&self, invalid_metadata: InvalidMetadata) -> Vec<Vec<Array>> {
        let (comparison, call, mut computed) = (self.comparison(invalid_metadata), self.call(), Vec::new());
        for_each_side(|side| {
            let results = call.results(side);
            comparison(&results);
            computed.push(self.computed(&results));
        });
        computed
    }

    /// The same for a call with valid metadata, whose runs must also give the same bits. Returns the results.
    fn assert_matches_reference(&self) -> Vec<Array> {
        let case = self.case();
        assert!(
            clamped_sequences(case).iter().all(|m| m.specified || m.len_q == 0),
            "{}: not everything is checked",
            case.name
        );
        let mut runs = self.compare_with_reference(InvalidMetadata::Unspecified);
        let have_same_bits = runs.iter().all(|run| *run == runs[0]);
        assert!(!self.is_deterministic() || have_same_bits, "{}: two runs differ", case.name);
        runs.swap_remove(0)
    }
}

impl ReferenceCase for AttentionCase {
    fn case(&self) -> &AttentionCase {
        self
    }

    fn case_mut(&mut self) -> &mut AttentionCase {
        self
    }

    fn call(&self) -> Invocation {
        self.invocation()
    }

    fn comparison(&self, invalid_metadata: InvalidMetadata) -> Comparison<'_> {
        let expected_rows = expected_rows(self, invalid_metadata);
        Box::new(move |actual| assert_matches_expected(self, &expected_rows, &actual[0], self.lse.then(|| &actual[1])))
    }
}

/// Asserts that the cases of `calls` agree with the reference. Its messages have `name` and the number of the call.
pub fn assert_calls_match_reference<Call, Case: ReferenceCase>(
    name: &str,
    calls: impl IntoIterator<Item = Call>,
    case: impl Fn(Call) -> Case,
) {
    for (index, call) in calls.into_iter().enumerate() {
        assert_named_matches_reference(&format!("{name} {index}"), &mut case(call));
    }
}

/// [`ReferenceCase::assert_matches_reference`], with a name for its messages.
pub fn assert_named_matches_reference(name: &str, call: &mut dyn ReferenceCase) -> Vec<Array> {
    call.case_mut().name = format!("{name}: {}", call.case().name);
    call.assert_matches_reference()
}
