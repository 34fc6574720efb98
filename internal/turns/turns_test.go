package turns

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
)

// IM-15 as well: an entry survives the hand-off to a waiter and goes with the last one.
func TestTurns(t *testing.T) {
	t.Parallel()
	var turns Turns
	var counts [3]int // each guarded by its name's turn
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			done, err := turns.Take(context.Background(), strconv.Itoa(i%3))
			if err != nil {
				t.Error(err)
				return
			}
			counts[i%3]++
			done()
		})
	}
	wg.Wait()
	if counts != [3]int{100, 100, 100} || turns.Len() != 0 {
		t.Errorf("%v, %d left", counts, turns.Len())
	}
}

func TestAWaiterLeaves(t *testing.T) {
	t.Parallel()
	var turns Turns
	done, err := turns.Take(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := turns.Take(ctx, "a"); err != why {
		t.Errorf("%v", err)
	}
	other, err := turns.Take(t.Context(), "b") // another name does not wait
	if err != nil {
		t.Fatal(err)
	}
	other()
	if done(); turns.Len() != 0 {
		t.Errorf("%d left", turns.Len())
	}
}
