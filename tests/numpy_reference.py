"""REKLS for one matrix in float64 NumPy, written from the formulas and nothing else.

KL factors: arXiv:2509.03378. SOAP: arXiv:2409.11321. LaProp: arXiv:2002.04839.
"""

import numpy as np


def eigh_descending(S):
    values, Q = np.linalg.eigh(S)
    return values[::-1], Q[:, ::-1]


class NumpyRekls:
    """`step(P, G)` returns the next parameter; every quantity of the state is an attribute."""

    def __init__(self, shape, lr, b1=0.9, b2=0.95, shampoo_beta=0.95, eps=1e-8, weight_decay=0.01,
                 method="decoupled", inner="adam", initial_eigenvalue=None, eigenvalue_floor=1e-2,
                 carry_second_moment=True, round_off_floor=256.0, machine_epsilon=2.0**-23):  # fmt: skip
        m, n = shape
        self.lr, self.b1, self.b2, self.shampoo_beta, self.eps = lr, b1, b2, shampoo_beta, eps
        self.weight_decay, self.method, self.inner = weight_decay, method, inner
        self.start, self.floor, self.carry = initial_eigenvalue, eigenvalue_floor, carry_second_moment
        self.round_off = round_off_floor * machine_epsilon
        self.machine_epsilon = machine_epsilon
        self.t, self.mu, self.nu = 0, np.zeros(shape), np.zeros(shape)
        self.L, self.R, self.Q_L, self.Q_R = np.zeros((m, m)), np.zeros((n, n)), np.eye(m), np.eye(n)
        self.eig_L, self.eig_R = np.full(m, self.start or 0.0), np.full(n, self.start or 0.0)

    def inverse(self, eig, G):
        rms = np.sqrt(np.mean(G**2))
        if self.start is None and eig.max() <= self.machine_epsilon * rms:
            eig = np.full_like(eig, rms)
        return 1 / np.maximum(eig, max(self.floor * eig.max(), self.eps, np.finfo(np.float32).tiny))

    def step(self, P, G):
        P, G, wd, lr = P.astype(np.float64), G.astype(np.float64), self.weight_decay, self.lr
        if self.method == "l2":
            G = G + wd * P
        update = self.direction(G)
        decay = {"decoupled": lr * wd, "independent": wd, "palm": lr**2 * wd, "l2": 0.0}[self.method]
        return P - lr * update - decay * P

    def direction(self, G):
        self.t += 1
        (m, n), t = G.shape, self.t
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        L_new = G @ self.Q_R @ np.diag(self.inverse(self.eig_R, G)) @ self.Q_R.T @ G.T / n
        R_new = G.T @ self.Q_L @ np.diag(self.inverse(self.eig_L, G)) @ self.Q_L.T @ G / m
        self.L, self.R = beta * self.L + (1 - beta) * L_new, beta * self.R + (1 - beta) * R_new
        Q_L_old, Q_R_old = self.Q_L, self.Q_R
        (self.eig_L, self.Q_L), (self.eig_R, self.Q_R) = eigh_descending(self.L), eigh_descending(self.R)
        if self.carry:
            self.nu = (self.Q_L.T @ Q_L_old) ** 2 @ self.nu @ ((self.Q_R.T @ Q_R_old) ** 2).T
        rotated = self.Q_L.T @ G @ self.Q_R
        self.nu = self.b2 * self.nu + (1 - self.b2) * rotated**2
        floor = self.eps + self.round_off * np.linalg.norm(G) / np.sqrt(max(m, n))
        scale = np.sqrt(self.nu / (1 - self.b2**t)) + floor
        averaged = G if self.inner == "adam" else self.Q_L @ (rotated / scale) @ self.Q_R.T
        self.mu = self.b1 * self.mu + (1 - self.b1) * averaged
        mean = self.mu / (1 - self.b1**t)
        return mean if self.inner == "laprop" else self.Q_L @ (self.Q_L.T @ mean @ self.Q_R / scale) @ self.Q_R.T
