"""REKLS and its family for one matrix in float64 NumPy, written from the formulas and nothing else.

KL factors: arXiv:2509.03378. SOAP: arXiv:2409.11321. LaProp: arXiv:2002.04839. Nesterov: Dozat 2016.
"""

import numpy as np


def eigh_descending(S):
    values, Q = np.linalg.eigh(S)
    return values[::-1], Q[:, ::-1]


class NumpyRekls:
    """`step(P, G)` returns the next parameter; every quantity of the state is an attribute."""

    def __init__(self, shape, lr=1.0, b1=0.9, b2=0.95, shampoo_beta=0.95, eps=1e-8, weight_decay=0.01,
                 method="decoupled", inner="adam", nesterov=False, max_update_rms=0.0, factors="kl", power_iterations=None,
                 every=1, turn=0, max_precond_dim=8192, initial_eigenvalue=None, eigenvalue_floor=1e-2,
                 carry_second_moment=True, round_off_floor=256.0, machine_epsilon=2.0**-23):  # fmt: skip
        m, n = shape
        self.lr, self.b1, self.b2, self.shampoo_beta, self.eps = lr, b1, b2, shampoo_beta, eps
        self.weight_decay, self.method, self.inner, self.nesterov = weight_decay, method, inner, nesterov
        self.max_rms, self.factors, self.power_iterations = max_update_rms, factors, power_iterations
        self.every, self.turn, self.both = every, turn, (m <= max_precond_dim, n <= max_precond_dim)
        self.start, self.floor, self.carry = initial_eigenvalue, eigenvalue_floor, carry_second_moment
        self.round_off, self.machine_epsilon = round_off_floor * machine_epsilon, machine_epsilon
        self.t, self.mu, self.nu = 0, np.zeros(shape), np.zeros(shape)
        self.L, self.R, self.Q_L, self.Q_R = np.zeros((m, m)), np.zeros((n, n)), np.eye(m), np.eye(n)
        self.eig_L, self.eig_R = np.full(m, self.start or 0.0), np.full(n, self.start or 0.0)

    def inverse(self, eig, Q, G, present):
        if self.factors == "plain" or not present:
            return np.eye(len(eig))
        rms = np.sqrt(np.mean(G**2))
        if self.start is None and eig.max() <= self.machine_epsilon * rms:
            eig = np.full_like(eig, rms)
        return Q @ np.diag(1 / np.maximum(eig, max(self.floor * eig.max(), self.eps, np.finfo(np.float32).tiny))) @ Q.T

    def refresh(self, S, eig, Q, present):
        """New eigenvalues and basis, and the permutation of the old one's columns that it comes with."""
        if not present or (self.t - 1) % self.every != self.turn:
            return eig, Q, np.arange(len(S))
        if self.power_iterations is None or self.t <= self.every:
            return *eigh_descending(S), np.arange(len(S))
        for _ in range(self.power_iterations):
            Q, _ = np.linalg.qr(S @ Q)
        eig = np.diag(Q.T @ S @ Q)
        order = np.argsort(-eig)
        return eig[order], Q[:, order], order

    def step(self, P, G):
        P, G, wd, lr = P.astype(np.float64), G.astype(np.float64), self.weight_decay, self.lr
        update = self.direction(G + wd * P if self.method == "l2" else G)
        decay = {"decoupled": lr * wd, "independent": wd, "palm": lr**2 * wd, "l2": 0.0}[self.method]
        return P - lr * update - decay * P

    def direction(self, G):
        self.t += 1
        (m, n), t, b1 = G.shape, self.t, self.b1
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        L_new = G @ self.inverse(self.eig_R, self.Q_R, G, self.both[1]) @ G.T / n
        R_new = G.T @ self.inverse(self.eig_L, self.Q_L, G, self.both[0]) @ G / m
        self.L, self.R = beta * self.L + (1 - beta) * L_new, beta * self.R + (1 - beta) * R_new
        Q_L_old, Q_R_old = self.Q_L, self.Q_R
        self.eig_L, self.Q_L, order_L = self.refresh(self.L, self.eig_L, self.Q_L, self.both[0])
        self.eig_R, self.Q_R, order_R = self.refresh(self.R, self.eig_R, self.Q_R, self.both[1])
        A2, B2 = (self.Q_L.T @ Q_L_old) ** 2, (self.Q_R.T @ Q_R_old) ** 2
        self.nu = A2 @ self.nu @ B2.T if self.carry else self.nu[order_L][:, order_R]
        rotated = self.Q_L.T @ G @ self.Q_R
        self.nu = self.b2 * self.nu + (1 - self.b2) * rotated**2
        largest = max(np.linalg.norm(X) for X in (G, (self.inner == "adam") * b1 * self.mu / (1 - b1**t) / 16))
        scale = np.sqrt(self.nu / (1 - self.b2**t)) + self.eps + self.round_off * largest / np.sqrt(max(m, n))
        averaged = G if self.inner == "adam" else self.Q_L @ (rotated / scale) @ self.Q_R.T
        self.mu = b1 * self.mu + (1 - b1) * averaged
        mean = self.mu / (1 - b1**t)
        if self.nesterov:
            mean = b1 * self.mu / (1 - b1 ** (t + 1)) + (1 - b1) * averaged / (1 - b1**t)
        update = mean if self.inner == "laprop" else self.Q_L @ (self.Q_L.T @ mean @ self.Q_R / scale) @ self.Q_R.T
        return update * min(1, self.max_rms / (np.sqrt(np.mean(update**2)) + 1e-7)) if self.max_rms else update
